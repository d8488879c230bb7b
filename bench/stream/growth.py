"""A stream as it grows: memory, speed, answers and energy at stated lengths, for each policy, full KV included.

InfiniPot-V's Table 6 and HERMES's Table 4 and Fig. 4. Each policy runs in a process of its own, so that its peak memory is its
own; they run one after the other. Frames are the demo world's and go in as fast as they are taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from edgevlm.bench.models import open_model
from edgevlm.bench.timing import quartiles
from edgevlm.calib.demo.world import World
from edgevlm.engines.power import Meter, find_meter
from edgevlm.engines.power.energy import Energy, idle_watts
from edgevlm.engines.threads import default_threads
from edgevlm.progress import Notify, to_stderr
from edgevlm.runtime.budget import TextBudget, available
from edgevlm.runtime.helper_process import Helper, HelperEnded
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL, AUTO

POLICIES = ("full", "auto", "infinipot-v", "hermes", "purekv")
QUESTION = "what has happened so far?"
RESERVE_MB = 512  # of the machine's memory, which full KV leaves to others


@dataclass(frozen=True, slots=True)
class GrowthWork:
    """What one process measures. ``marks``: frames, rising; ``budget``: vision tokens, None for the model's own."""

    model: str
    policy: str
    budget: int | None
    chunk: int
    marks: tuple[int, ...]
    fps: float
    questions: int = 5
    answer_tokens: int = 16
    threads: int | None = None
    idle_w: float | None = None

    def place(self, mark: int) -> dict[str, Any]:
        """The fields of a line that say what it is about."""
        return {
            "bench": "stream", "model": self.model, "policy": self.policy, "chunk": self.chunk, "frames": mark,
            "seconds": round(mark / self.fps, 1), "threads": self.threads or default_threads(),
        }  # fmt: skip


def growth(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = POLICIES,
    budget: int | None = None,
    fps: float = 2.0,
    frames: Sequence[int] = (16, 64, 256, 512),
    chunk: Sequence[int] = (8,),
    questions: int = 5,
    answer_tokens: int = 16,
    idle: float = 10.0,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model, policy, chunk and number of frames.

    ``idle``: seconds for which the machine's power at rest is measured first, where it has a meter. Full KV that would not fit
    is not begun, and a process that the system kills while memory is short is a line with ``oom``. Raises UserError for what a
    process says the user did wrong.
    """
    for name in policy:
        if name != AUTO:
            create_policy(name)
    meter, missing = find_meter()
    idle_w = None
    if meter is None:
        to_stderr(f"energy: not measured ({'; '.join(missing)})")
    elif idle:
        progress(f"measuring {meter.name} at rest for {idle:g} s")
        idle_w = idle_watts(meter, idle)
    shared: dict[str, Any] = {
        "budget": budget, "marks": tuple(sorted(frames)), "fps": fps, "questions": questions, "answer_tokens": answer_tokens,
        "threads": threads, "idle_w": idle_w,
    }  # fmt: skip
    for name, text, size in product(model, policy, chunk):
        work = GrowthWork(model=name, policy=text, chunk=size, **shared)
        left = list(work.marks)
        progress(f"{name}, {text}, chunks of {size}: up to {left[-1]} frames")
        try:
            with Helper() as helper:
                for line in helper.lines("edgevlm.bench.stream.growth:measured", asdict(work)):
                    left.remove(line["frames"])
                    yield line
                    if left:
                        progress(f"{name}, {text}, chunks of {size}: up to {left[-1]} frames, {line['frames']} done")
        except HelperEnded as error:
            if error.code != -9:
                raise
            for mark in left:
                yield work.place(mark) | {"oom": True, "stopped": "the system killed it: its memory is short"}


@dataclass(slots=True)
class Pace:
    """Chunks as a session takes them: (frames, seconds) each; ``cold_s``: a frame of the first chunk, which is apart."""

    chunks: list[tuple[int, float]] = field(default_factory=list)
    cold_s: float | None = None

    def took(self, frames: int, seconds: float) -> None:
        if self.cold_s is None:
            self.cold_s = seconds / frames
        else:
            self.chunks.append((frames, seconds))

    def line(self) -> dict[str, float | None]:
        """Frames a second over the warm chunks, with quartiles; None where there is none."""
        cold = {"cold_ms_per_frame": None if self.cold_s is None else round(1e3 * self.cold_s, 3)}
        if not self.chunks:
            return {"fps": None, "fps_low": None, "fps_high": None, **cold}
        low, _, high = quartiles([frames / seconds for frames, seconds in self.chunks])
        frames, seconds = (sum(part) for part in zip(*self.chunks, strict=True))
        return {"fps": round(frames / seconds, 3), "fps_low": round(low, 3), "fps_high": round(high, 3), **cold}


def measured(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure in a process of its own; the work as its fields."""
    return measure(GrowthWork(**work))


def measure(work: GrowthWork) -> Iterator[dict[str, Any]]:
    """A line a mark. Raises UserError for a model, policy or source that is not one."""
    meter, _ = find_meter()
    with ExitStack() as stack:
        model = stack.enter_context(open_model(work.model, work.threads or default_threads(), lambda what: None))
        marks, budget, refused = work.marks, work.budget, ""
        if work.policy != AUTO and not create_policy(work.policy).bounded:
            marks, budget, refused = _fitting(model, work)
        if marks:
            session = stack.enter_context(Session.open(model, policy=work.policy, budget=budget, chunk=work.chunk, append=ALL))
            yield from _watch(session, work, marks, meter)
        for mark in work.marks[len(marks) :]:
            yield work.place(mark) | {"oom": "memory" in refused, "stopped": refused}


def _watch(session: Session, work: GrowthWork, marks: tuple[int, ...], meter: Meter | None) -> Iterator[dict[str, Any]]:
    world, seen, pace = World(0), 0, Pace()
    for mark in marks:
        energy = Energy(meter, idle_w=work.idle_w) if meter else None
        before, compress_ms = session.stats.frames, session.stats.memory.compress_ms
        pace.chunks.clear()
        began = since = time.perf_counter()
        with energy or ExitStack():
            chunk, chunks = 0, session.stats.chunks
            while seen < mark:
                seen, chunk = seen + 1, chunk + 1
                session.watch(world.step(), seen / work.fps)
                if seen == mark:
                    session.flush()
                if session.stats.chunks > chunks:
                    now, chunks = time.perf_counter(), session.stats.chunks
                    pace.took(chunk, now - since)
                    since, chunk = now, 0
        took, after = time.perf_counter() - began, session.stats
        answers = _ask(session, work, meter)
        count, cache = after.frames - before, session.cache
        held = int(cache.lengths.sum()) * 2 * cache.kv_heads * cache.head_dim * cache.dtype.itemsize
        yield work.place(mark) | {
            "policy_used": session.policy,
            "budget": session.budget,
            "peak_rss_mb": round(peak_rss() / 1e6, 1),
            "cache_mb": round(held / 1e6, 2),
            "arena_mb": round(after.cache_bytes / 1e6, 2),
            "policy_mb": round(after.policy_bytes / 1e6, 3),
            **pace.line(),
            **answers,
            "compress_fraction": round((after.memory.compress_ms - compress_ms) / (1e3 * took), 5),
            "joules_per_frame": _per(energy.joules if energy else None, count),
            "net_joules_per_frame": _per(energy.net() if energy else None, count),
            "oom": False,
        }


def _fitting(model: Model, work: GrowthWork) -> tuple[tuple[int, ...], int | None, str]:
    """The marks up to which a cache without a bound fits, its capacity in tokens, and why the next one does not fit."""
    per_frame, refused = model.rows_per_frame, ""
    limit = model.bundle.limit - TextBudget.fitting(model.bundle.limit).rows(model) - len(model.closing)
    spec = model.bundle.decoder
    each = 2 * spec.layers * spec.kv_heads * spec.head_dim * DTYPES[spec.kv].itemsize
    for count in range(len(work.marks), 0, -1):
        tokens = work.marks[count - 1] * per_frame
        if tokens + per_frame > limit:
            refused = f"the model has positions for {limit:,} tokens and this takes {tokens:,}"
        elif tokens * each + (RESERVE_MB << 20) > available().free:
            refused = f"{tokens * each / 1e6:,.0f} MB of keys and values do not fit in the memory that is free"
        else:
            return work.marks[:count], tokens, refused
    return (), None, refused


def _ask(session: Session, work: GrowthWork, meter: Meter | None) -> dict[str, float | None]:
    """The same question several times: times to the first token and for each further one; the first answer is cold."""
    ttft_ms, tpot_ms, tokens, energy = list[float](), list[float](), 0, Energy(meter) if meter else None
    most = min(work.answer_tokens, session.text_budget.answer)
    cold = session.ask(QUESTION, max_tokens=most)
    cold.settle()
    with energy or ExitStack():
        for _ in range(work.questions):
            answer = session.ask(QUESTION, max_tokens=most)
            answer.wait()
            ttft_ms.append(answer.ttft_ms)
            tokens += len(answer.token_ids)
            if len(answer.token_ids) > 1:
                tpot_ms.append(answer.tpot_ms)
    return {
        **_percentiles("ttft_ms", ttft_ms),
        "cold_ttft_ms": round(cold.ttft_ms, 3),
        **_percentiles("tpot_ms", tpot_ms),
        "tokens_per_s": round(1e3 / float(np.median(tpot_ms)), 2) if tpot_ms else None,
        "joules_per_token": _per(energy.joules if energy else None, tokens),
    }


def peak_rss() -> int:
    """The most resident memory that this process has had, bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) << 10
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    found = np.percentile(values, [50, 95, 99]) if values else (None, None, None)
    return {f"{name}_p{p}": None if x is None else round(float(x), 3) for p, x in zip((50, 95, 99), found, strict=True)}


def _per(joules: float | None, count: int) -> float | None:
    return None if joules is None or not count else round(joules / count, 5)
