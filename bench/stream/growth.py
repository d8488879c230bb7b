"""Measure memory, speed, answers and energy as a stream grows, for each policy including full KV.

The measurements follow InfiniPot-V's Table 6 and HERMES's Table 4 and Fig. 4. Policies run one after another, each in a
separate process, so that each policy's peak memory is measured alone. Demo frames arrive as fast as the session watches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from edgevlm.bench.models import open_model
from edgevlm.bench.timing import percentiles, spread, time_job, timed, watching
from edgevlm.calib.demo.world import World
from edgevlm.engines.power import Energy, Meter, find_meter
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import show, to_stderr
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.helper_process import Helper, HelperEnded
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL, AUTO

POLICIES = ("full", "auto", "infinipot-v", "hermes", "purekv")
QUESTION = "what has happened so far?"
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class GrowthWork:
    """The measurements that one process makes. ``marks``: the numbers of frames after which to measure."""

    model: str
    policy: str
    budget: int | None
    chunk: int
    marks: tuple[int, ...]
    questions: int = 5
    threads: int | None = None
    engine: str = DEFAULT_ENGINE

    def place(self, mark: int) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in ("model", "policy", "chunk")}
        return {"bench": "stream", **about, "frames": mark, "threads": self.threads or default_threads()}


def growth(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = POLICIES,
    budget: int | None = None,
    frames: Sequence[int] = (16, 64, 256, 512),
    chunk: Sequence[int] = (8,),
    questions: int = 5,
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each model, policy, chunk size and number of frames.

    Full KV is skipped if it would not fit in memory. ``oom``: whether a run stopped for lack of memory. Raises UserError for an
    invalid policy or model.
    """
    for name in policy:
        if name != AUTO:
            create_policy(name)
    meter, missing = find_meter()
    if meter is None:
        to_stderr(f"energy: not measured ({'; '.join(missing)})")
    for name, text, size in product(model, policy, chunk):
        work = GrowthWork(name, text, budget, size, tuple(sorted(frames)), questions, threads, engine)
        left = list(work.marks)
        show(f"{name}, {text}, chunks of {size}: up to {left[-1]} frames")
        try:
            with Helper() as helper:
                for line in helper.lines(f"{__name__}:measured", **asdict(work)):
                    left.remove(line["frames"])
                    yield line
        except HelperEnded as error:
            if error.code != -9:
                raise
            for mark in left:
                yield work.place(mark) | {"oom": True, "stopped": "killed by the system: out of memory"}


def measured(**work: Any) -> Iterator[dict[str, Any]]:
    """Measure in a separate process. ``work``: the fields of a GrowthWork."""
    return measure(GrowthWork(**work))


def measure(work: GrowthWork) -> Iterator[dict[str, Any]]:
    """Yield measurements after each number of frames. Raises UserError for an invalid model or policy."""
    with ExitStack() as stack:
        model = stack.enter_context(open_model(work.model, work.threads or default_threads(), work.engine))
        session, marks, refused = _opened(model, work)
        if session is not None:
            stack.enter_context(session)
            yield from _grow(session, work, marks)
        for mark in work.marks[len(marks) :]:
            yield work.place(mark) | {"oom": "free" in refused, "stopped": refused}


def _opened(model: Model, work: GrowthWork) -> tuple[Session | None, tuple[int, ...], str]:
    """Open a session. Return the session, the numbers of frames that fit in its cache, and why larger numbers do not fit."""
    bounded, refused = work.policy == AUTO or create_policy(work.policy).bounded, ""
    for count in range(len(work.marks), 0, -1):
        budget = work.budget if bounded else work.marks[count - 1] * model.rows_per_frame
        try:
            session = Session.open(model, policy=work.policy, budget=budget, chunk=work.chunk, append=ALL, encode=ALL)
        except UserError as error:
            if bounded:
                raise
            refused = str(error)
        else:
            return session, work.marks[:count], refused
    return None, (), refused


def _grow(session: Session, work: GrowthWork, marks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    world, seen, cold_ms, (meter, _) = World(0), 0, 0.0, find_meter()
    for mark in marks:
        first, compress_ms, chunks = seen, session.stats.memory.compress_ms, list[tuple[int, float]]()  # frames and seconds
        energy = Energy(meter) if meter else None
        with energy or ExitStack():
            while seen < mark:
                frames = [world.step() for _ in range(min(work.chunk, mark - seen))]
                took, seen = time_job(watching(session, frames)).wall, seen + len(frames)
                chunks.append((len(frames), len(frames) * took / 1e3))
            flush_s = timed(session.flush) / 1e3
        seconds, after = sum(took for _, took in chunks) + flush_s, session.stats
        if not first:  # the first chunk is cold
            count, took = chunks.pop(0)
            cold_ms = round(1e3 * took / count, 3)
        fps = spread((count / took for count, took in chunks), "fps", "fps_low", "fps_high")
        if chunks:
            fps["fps"] = round(sum(count for count, _ in chunks) / sum(took for _, took in chunks), 3)
        cache = session.cache
        held = int(cache.lengths.sum()) * 2 * cache.kv_heads * cache.head_dim * cache.dtype.itemsize
        yield work.place(mark) | {
            "policy_used": session.policy, "budget": session.budget, "peak_rss_mb": round(peak_rss() / 1e6, 1),
            "cache_mb": round(held / 1e6, 2), **fps, "cold_ms_per_frame": cold_ms, **_ask(session, work, meter),
            "compress_fraction": round((after.memory.compress_ms - compress_ms) / (1e3 * seconds), 5),
            "joules_per_frame": _per(energy, mark - first), "oom": False,
        }  # fmt: skip


def _ask(session: Session, work: GrowthWork, meter: Meter | None) -> dict[str, float | None]:
    """Ask a question repeatedly. Return the ms to the first token and per further token.

    The times of the first answer are reported separately.
    """
    most, energy = min(ANSWER_TOKENS, session.text_budget.answer), Energy(meter) if meter else None
    cold, answers = session.ask(QUESTION, max_tokens=most), []
    cold.settle()
    with energy or ExitStack():
        for _ in range(work.questions):
            answers.append(session.ask(QUESTION, max_tokens=most))
            answers[-1].wait()
    tpot = percentiles((answer.tpot_ms for answer in answers if len(answer.token_ids) > 1), "tpot_ms")
    return {
        **percentiles((answer.ttft_ms for answer in answers), "ttft_ms"), "cold_ttft_ms": round(cold.ttft_ms, 3), **tpot,
        "tokens_per_s": round(1e3 / tpot["tpot_ms_p50"], 2) if tpot["tpot_ms_p50"] else None,
        "joules_per_token": _per(energy, sum(len(answer.token_ids) for answer in answers)),
    }  # fmt: skip


def peak_rss() -> int:
    """Return this process's peak resident memory, in bytes."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def _per(energy: Energy | None, count: int) -> float | None:
    return None if energy is None or energy.joules is None or not count else round(energy.joules / count, 5)
