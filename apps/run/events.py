"""What a run reports: answers and statistics, as JSON lines or text on stdout; everything else goes to stderr."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Protocol

from edgevlm.apps.run.clock import NOW_S, clock_time
from edgevlm.apps.schemas import json_line
from edgevlm.progress import to_stderr
from edgevlm.runtime.evidence import Evidence
from edgevlm.runtime.snapshots.capture import ago
from edgevlm.runtime.store import StoreUse


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """A finished answer, from what was watched up to ``time_s`` of the stream.

    ``truth`` is known in the demo world only; ``others``: names and answers of the memories beside it, in a comparison.
    ``evidence``: what it was read from. ``offset``: wall clock of the stream's time 0; None for recordings, of which nobody
    knows it.
    """

    time_s: float
    question: str
    text: str
    token_ids: list[int]
    ttft_ms: float
    tpot_ms: float
    truth: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    evidence: Evidence | None = None
    offset: float | None = None

    @property
    def seen(self) -> str:
        """When what it was read from was last seen, in words; empty where that is now, or nobody knows."""
        if self.evidence is None:
            return ""
        if self.evidence.held is False:
            return "what would answer this is no longer in memory"
        if self.evidence.held is None or not self.evidence.moments:
            return ""
        until_s = self.evidence.moments[0].until_s
        if self.time_s - until_s < NOW_S:
            return ""
        if self.offset is None:
            return f"seen {ago(self.time_s - until_s)} ago"
        return f"seen {clock_time(self.offset + until_s, self.offset + self.time_s)}"

    @property
    def when(self) -> str:
        """The time of the newest frame that it takes into account: wall clock, or seconds of a recording."""
        if self.offset is None:
            return f"{self.time_s:.1f} s"
        seconds = self.offset + self.time_s
        return clock_time(seconds, seconds)


@dataclass(frozen=True, slots=True)
class StatsEvent:
    """A run's figures at one moment; ``fps`` since the line before, in a summary over the whole run.

    ``policy``: the one in use, also under ``auto``. ``dropped`` is the sum of ``drops`` by cause; ``gated`` frames were held
    back by the gate and are not among ``frames``. ``source_problem``: why the source is not running. ``store``: what a
    retrieval policy keeps off the device.
    """

    frames: int
    dropped: int
    drops: dict[str, int]
    gated: int
    fps: float
    policy: str
    cache_tokens: int
    cache_bytes: int
    appended: float
    encoded: float
    compressions: int
    compress_ms: float
    rss_bytes: int
    source_state: str
    source_problem: str | None
    reconnects: int
    store: StoreUse | None = None

    def __str__(self) -> str:
        dropped = f" ({self.dropped} dropped)" if self.dropped else ""
        gated = f" ({self.gated} gated)" if self.gated else ""
        state = f"{self.source_state} ({self.source_problem})" if self.source_problem else self.source_state
        return (
            f"{state} · {self.frames} frames{dropped}{gated} · {self.fps:.1f} fps · memory {self.cache_tokens} tokens, "
            f"{self.cache_bytes / 1e6:.1f} MB{self._changed()}{self._offloaded()} · "
            f"{self.compressions} compressions, {self.compress_ms:.1f} ms · process {self.rss_bytes / 1e6:.0f} MB"
        )

    def _changed(self) -> str:
        encoded = f", {self.encoded:.0%} of patches encoded" if self.encoded < 1 else ""
        return encoded + (f", {self.appended:.0%} of tokens appended" if self.appended < 1 else "")

    def _offloaded(self) -> str:
        if self.store is None:
            return ""
        lost = f", {self.store.stats.lost} clusters lost" if self.store.stats.lost else ""
        host, file = self.store.host_bytes / 1e6, self.store.file_bytes / 1e6
        return f", offloaded {host:.1f} MB to host memory and {file:.1f} MB to a file{lost}"


class Output(Protocol):
    """Where a run's answers and figures go. Called from several threads."""

    def answer(self, answer: AnswerEvent) -> None: ...
    def piece(self, text: str) -> None:
        """A piece of an answer that is being generated."""

    def stats(self, stats: StatsEvent) -> None: ...
    def summary(self, stats: StatsEvent) -> None: ...
    def notice(self, text: str) -> None: ...


class JsonOutput:
    """One JSON object a line on stdout, in ASCII."""

    def __init__(self, quiet: bool = False) -> None:
        self._lock = threading.Lock()
        self._quiet = quiet

    def chosen(self, fields: dict[str, object]) -> None:
        """What was chosen for a checkpoint."""
        self._line("chosen", fields)

    def answer(self, answer: AnswerEvent) -> None:
        fields = asdict(answer) | evidence_fields(answer.evidence, answer.offset)
        del fields["others"], fields["offset"]
        if answer.truth is None:
            del fields["truth"]
        self._line("answer", fields)

    def piece(self, text: str) -> None:
        """A line holds a whole answer."""

    def stats(self, stats: StatsEvent) -> None:
        self._line("stats", _fields(stats))

    def summary(self, stats: StatsEvent) -> None:
        self._line("summary", _fields(stats))

    def notice(self, text: str) -> None:
        if not self._quiet:
            to_stderr(text)

    def _line(self, event: str, fields: dict[str, object]) -> None:
        with self._lock:
            print(json_line(event, {"time": wall_clock(), **_rounded(fields)}), flush=True)


class TextOutput:
    """One line per answer on stdout; notices, the summary and, ``with_stats``, statistics on stderr unless ``quiet``."""

    def __init__(self, quiet: bool = False, with_stats: bool = False) -> None:
        self._quiet, self._with_stats = quiet, with_stats

    def answer(self, answer: AnswerEvent) -> None:
        truth = "" if answer.truth is None else f"   (truth: {answer.truth})"
        seen = f"   ({answer.seen})" if answer.seen else ""
        print(f"[{answer.when}] {answer.question}  {answer.text}{truth}{seen}", flush=True)

    def piece(self, text: str) -> None:
        """A line holds a whole answer."""

    def stats(self, stats: StatsEvent) -> None:
        if self._with_stats:
            self.notice(str(stats))

    def summary(self, stats: StatsEvent) -> None:
        self.notice(str(stats))

    def notice(self, text: str) -> None:
        if not self._quiet:
            to_stderr(text)


def evidence_fields(evidence: Evidence | None, offset: float | None = None) -> dict[str, object]:
    """``evidence``, a list of moments, best first, and ``evidence_held``, null where nobody knows, as JSON has them.

    A moment has its wall clock, ``time``, where that of the stream's time 0 is known. None is named where what would answer is
    no longer in memory.
    """
    if evidence is None:
        return {"evidence": [], "evidence_held": None}
    moments = [
        {
            "time": None if offset is None else wall_clock(offset + moment.time_s),
            **{name: finite(value) for name, value in asdict(moment).items()},
        }
        for moment in (() if evidence.held is False else evidence.moments)
    ]
    return {"evidence": moments, "evidence_held": evidence.held}


def finite(value: object) -> object:
    """Floats to four places; those that JSON has no word for become null."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return list(value) if isinstance(value, tuple) else value


def wall_clock(seconds: float | None = None) -> str:
    """Now, or ``seconds`` since 1970, in UTC, as RFC 3339 has it: ``2026-11-22T16:30:05.123Z``."""
    return (
        datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _fields(stats: StatsEvent) -> dict[str, object]:
    fields = asdict(stats)
    if stats.store is None:
        del fields["store"]
    else:
        fields["store"]["stats"] = _rounded(fields["store"]["stats"])
    return fields


def _rounded(fields: dict[str, object]) -> dict[str, object]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
