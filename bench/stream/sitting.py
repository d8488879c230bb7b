"""One stream, one policy: what it takes at each mark. Run in a process of its own, which prints lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from edgevlm.apps.sources import Frame, SourceOptions, open_source
from edgevlm.bench.rounds import quartiles
from edgevlm.bench.share import opened
from edgevlm.engines.power import Meter, find_meter
from edgevlm.engines.power.energy import Energy
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.runtime.auto import AUTO
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.framing import Framing
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.pressure import available
from edgevlm.runtime.session import Session

QUESTION = "what has happened so far?"
SPARE_MB = 512  # of the machine's memory, that full KV leaves to others
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Work:
    """What one process measures. marks: frames, rising; budget: vision tokens, None for the model's own; chunk: frames."""

    model: str
    policy: str
    budget: int | None
    chunk: int
    marks: tuple[int, ...]
    fps: float
    camera: str | None = None
    video: str | None = None
    questions: int = 5
    answer_tokens: int = 16
    threads: int | None = None
    idle_w: float | None = None


@dataclass(slots=True)
class Asked:
    """Milliseconds to the first token of each question, and of each further token; joules of them all.

    cold_ms: to the first token of the question before them.
    """

    cold_ms: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    joules: float | None = None


@dataclass(slots=True)
class Pace:
    """Chunks as a session takes them: (frames, seconds) of each. cold_s: of a frame of the stream's first, which is apart."""

    chunks: list[tuple[int, float]] = field(default_factory=list)
    cold_s: float | None = None

    def took(self, frames: int, seconds: float) -> None:
        if self.cold_s is None:
            self.cold_s = seconds / frames
        else:
            self.chunks.append((frames, seconds))

    def line(self) -> dict[str, float | None]:
        """Frames a second of the warm chunks, all of them, with quartiles; null where there is none."""
        cold = {"cold_ms_per_frame": None if self.cold_s is None else round(1e3 * self.cold_s, 3)}
        if not self.chunks:
            return {"fps": None, "fps_low": None, "fps_high": None, **cold}
        low, _, high = quartiles([frames / seconds for frames, seconds in self.chunks])
        frames, seconds = (sum(part) for part in zip(*self.chunks, strict=True))
        return {"fps": round(frames / seconds, 3), "fps_low": round(low, 3), "fps_high": round(high, 3), **cold}


def sit(work: Work) -> Iterator[dict[str, Any]]:
    """A line a mark. Raises UserError for a model, policy or source that is not one."""
    meter, _ = find_meter()
    with ExitStack() as stack:
        subject = stack.enter_context(opened(work.model, work.threads or default_threads(), lambda what: None))
        marks, budget, refused = work.marks, work.budget, ""
        if work.policy != AUTO and not create_policy(work.policy).bounded:
            marks, budget, refused = _fitting(subject.model, work)
        if marks:
            session = stack.enter_context(Session.open(subject.model, policy=work.policy, budget=budget, chunk=work.chunk))
            yield from _watch(session, work, marks, meter)
        for mark in work.marks[len(marks) :]:
            yield place(work, mark) | {"oom": "memory" in refused, "stopped": refused}


def _watch(session: Session, work: Work, marks: tuple[int, ...], meter: Meter | None) -> Iterator[dict[str, Any]]:
    frames, seen, pace = frames_of(work), 0, Pace()
    for mark in marks:
        energy = Energy(meter, idle_w=work.idle_w) if meter else None
        before, compress_ms, dropped = session.stats.frames, session.stats.memory.compress_ms, 0
        pace.chunks.clear()
        begun = since = time.perf_counter()
        with energy or ExitStack():
            chunk, chunks = 0, session.stats.chunks
            while seen < mark:
                frame, dropped = next(frames)
                session.watch(frame.image if frame.pixels is None else frame.pixels, frame.time_s)
                seen, chunk = seen + 1, chunk + 1
                if seen == mark:
                    session.flush()
                if session.stats.chunks > chunks:
                    now, chunks = time.perf_counter(), session.stats.chunks
                    pace.took(chunk, now - since)
                    since, chunk = now, 0
        took = time.perf_counter() - begun
        after = session.stats
        asked = _ask(session, work, meter)
        count = after.frames - before
        yield place(work, mark) | {
            "policy_used": session.policy,
            "budget": session.budget,
            "peak_rss_mb": round(peak_rss() / 1e6, 1),
            "cache_mb": round(_held(session) / 1e6, 2),
            "arena_mb": round(after.cache_bytes / 1e6, 2),
            "policy_mb": round(after.policy_bytes / 1e6, 3),
            **pace.line(),
            **_spread("ttft_ms", asked.ttft_ms),
            "cold_ttft_ms": round(asked.cold_ms, 3),
            **_spread("tpot_ms", asked.tpot_ms),
            "tokens_per_s": round(1e3 / float(np.median(asked.tpot_ms)), 2) if asked.tpot_ms else None,
            "compress_share": round((after.memory.compress_ms - compress_ms) / (1e3 * took), 5),
            "joules_per_frame": _per(energy.joules if energy else None, count),
            "net_joules_per_frame": _per(energy.net() if energy else None, count),
            "joules_per_token": _per(asked.joules, asked.tokens),
            "dropped": dropped,
            "oom": False,
        }


def place(work: Work, mark: int) -> dict[str, Any]:
    return {
        "bench": "stream", "model": work.model, "policy": work.policy, "chunk": work.chunk, "frames": mark,
        "seconds": round(mark / work.fps, 1), "threads": work.threads or default_threads(),
    }  # fmt: skip


def _fitting(model: Model, work: Work) -> tuple[tuple[int, ...], int | None, str]:
    """The marks up to which a memory without a bound fits, its capacity in tokens, and why the next one does not."""
    per_frame, refused = Framing(model).rows_per_frame, ""
    limit = model.bundle.limit - TextBudget.fitting(model.bundle.limit).rows(model) - len(model.closing)
    spec = model.bundle.decoder
    each = 2 * spec.layers * spec.kv_heads * spec.head_dim * DTYPES[spec.kv].itemsize
    for count in range(len(work.marks), 0, -1):
        tokens = work.marks[count - 1] * per_frame
        if tokens + per_frame > limit:
            refused = f"the model has positions for {limit:,} tokens and this takes {tokens:,}"
        elif tokens * each + (SPARE_MB << 20) > available().free:
            refused = f"{tokens * each / 1e6:,.0f} MB of keys and values do not fit in the memory that is free"
        else:
            return work.marks[:count], tokens, refused
    return (), None, refused


def frames_of(work: Work) -> Iterator[tuple[Frame, int]]:
    """Frames without end, and how many were dropped: a recording is played again, its times going on."""
    passed, options = 0.0, SourceOptions(fps=work.fps)
    while True:
        source = open_source(work.camera, work.video, options)
        last = None
        try:
            for last in source:
                yield _later(last, passed), source.dropped
        finally:
            source.close()
        if last is None or source.live:
            raise UserError(f"{source.name} ended; give a longer one, or fewer --frames")
        passed += last.time_s + 1 / work.fps


def _later(frame: Frame, seconds: float) -> Frame:
    return replace(frame, time_s=frame.time_s + seconds) if seconds else frame


def _ask(session: Session, work: Work, meter: Meter | None) -> Asked:
    """The same question some times; the first is cold."""
    asked, energy = Asked(), Energy(meter) if meter else None
    most = min(work.answer_tokens, session.text_budget.answer)
    first = session.ask(QUESTION, max_tokens=most)
    first.settle()
    asked.cold_ms = first.ttft_ms
    with energy or ExitStack():
        for _ in range(work.questions):
            answer = session.ask(QUESTION, max_tokens=most)
            answer.wait()
            asked.ttft_ms.append(answer.ttft_ms)
            asked.tokens += len(answer.token_ids)
            if len(answer.token_ids) > 1:
                asked.tpot_ms.append(answer.tpot_ms)
    asked.joules = energy.joules if energy else None
    return asked


def _held(session: Session) -> int:
    """Bytes of the rows that the cache holds, their metadata apart."""
    cache = session.cache
    row = 2 * cache.kv_heads * cache.head_dim * cache.dtype.itemsize
    return int(cache.lengths.sum()) * row


def peak_rss() -> int:
    """The most resident memory this process has had, bytes."""
    try:
        words = next(line.split() for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)
    return int(words[1]) << 10


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    """p50, p95 and p99."""
    found = np.percentile(values, [50, 95, 99]) if values else (None, None, None)
    return {f"{name}_p{p}": None if x is None else round(float(x), 3) for p, x in zip((50, 95, 99), found, strict=True)}


def _per(joules: float | None, count: int) -> float | None:
    return None if joules is None or not count else round(joules / count, 5)


def main(emit: Callable[[str], object] = print) -> None:
    """Measure the work that is written on stdin; a line of what a user did wrong on stdout, as ``error``."""
    try:
        for line in sit(Work(**json.load(sys.stdin))):
            emit(json.dumps(line))
            sys.stdout.flush()
    except UserError as error:
        emit(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
