"""Where a run's answers and figures go: JSON lines or plain text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Protocol

from edgevlm.runtime.store import StoreUse


@dataclass(frozen=True, slots=True)
class Answered:
    """A finished answer. ``truth`` is known only in the demo world."""

    time_s: float
    question: str
    text: str
    token_ids: list[int]
    ttft_ms: float
    tpot_ms: float
    truth: str | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """A run's figures at one moment; ``fps`` over the last second, in a summary over the whole run.

    policy: the one in use, also under ``auto``.
    ``dropped`` is the sum of ``drops``, which has them by cause; ``gated`` frames were held back by the gate and are not among
    ``frames``; ``source_problem`` says why the source is not running; ``store``: what a policy that retrieves keeps below.
    """

    frames: int
    dropped: int
    drops: dict[str, int]
    gated: int
    fps: float
    policy: str
    cache_tokens: int
    cache_bytes: int
    compressions: int
    compress_ms: float
    rss_bytes: int
    source_state: str
    source_problem: str | None
    reconnects: int
    store: StoreUse | None = None


class Output(Protocol):
    def answer(self, answered: Answered) -> None: ...
    def piece(self, text: str) -> None: ...
    def stats(self, stats: Stats) -> None: ...
    def summary(self, stats: Stats) -> None: ...
    def notice(self, text: str) -> None: ...


class JsonOutput:
    """One JSON object a line on stdout, in ASCII, from whatever thread; ``with_truth`` beside answers, where it is known."""

    def __init__(self, with_truth: bool = False) -> None:
        self._lock = threading.Lock()
        self._with_truth = with_truth

    def answer(self, answered: Answered) -> None:
        fields = _rounded(asdict(answered))
        if answered.truth is None or not self._with_truth:
            del fields["truth"]
        self._line({"event": "answer", **fields})

    def piece(self, text: str) -> None:
        """A line holds a whole answer."""

    def stats(self, stats: Stats) -> None:
        self._line({"event": "stats", **_fields(stats)})

    def summary(self, stats: Stats) -> None:
        self._line({"event": "summary", **_fields(stats)})

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _line(self, record: dict[str, object]) -> None:
        with self._lock:
            print(json.dumps(record), flush=True)


class TextOutput:
    """A line an answer on stdout, the summary on stderr."""

    def answer(self, answered: Answered) -> None:
        truth = "" if answered.truth is None else f"   (truth: {answered.truth})"
        print(f"[{answered.time_s:.1f} s] {answered.question}  {answered.text}{truth}", flush=True)

    def piece(self, text: str) -> None:
        """A line holds a whole answer."""

    def stats(self, stats: Stats) -> None:
        """Nothing: a log does not need a line a second."""

    def summary(self, stats: Stats) -> None:
        print(describe(stats), file=sys.stderr, flush=True)

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def describe(stats: Stats) -> str:
    """One line for a person."""
    dropped = f" ({stats.dropped} dropped)" if stats.dropped else ""
    gated = f" ({stats.gated} gated)" if stats.gated else ""
    state = f"{stats.source_state} ({stats.source_problem})" if stats.source_problem else stats.source_state
    below = "" if stats.store is None else f", {_below(stats.store)}"
    return (
        f"{state} · {stats.frames} frames{dropped}{gated} · {stats.fps:.1f} fps · memory {stats.cache_tokens} tokens, "
        f"{stats.cache_bytes / 1e6:.1f} MB{below} · {stats.compressions} compressions, {stats.compress_ms:.1f} ms · "
        f"process {stats.rss_bytes / 1e6:.0f} MB"
    )


def _below(store: StoreUse) -> str:
    lost = f", {store.stats.lost} clusters lost" if store.stats.lost else ""
    return f"below it {store.host_bytes / 1e6:.1f} MB in host memory, a file of {store.file_bytes / 1e6:.1f} MB{lost}"


def _fields(stats: Stats) -> dict[str, object]:
    fields = asdict(stats)
    if stats.store is None:
        del fields["store"]
    else:
        fields["store"] = {**fields["store"], "stats": _rounded(fields["store"]["stats"])}
    return _rounded(fields)


def _rounded(fields: dict[str, object]) -> dict[str, object]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
