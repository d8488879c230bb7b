"""Time jobs that take turns, and summarise their times as medians, quartiles and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from edgevlm.progress import show
from edgevlm.runtime.session import Session

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Job:
    """A job to time. The time spent in ``run`` is divided by ``count``. Time spent in ``after`` is not counted."""

    run: Callable[[], object]
    count: int = 1
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Took:
    """A job's milliseconds per item, by the clock and as processor time of all threads."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> float:
    return time_job(Job(work)).wall


def time_job(job: Job) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    job.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    job.after()
    return Took(1e3 * wall / job.count, 1e3 * cpu / job.count)


def watching(session: Session, frames: Sequence[Any]) -> Job:

    def watch() -> None:
        for frame in frames:
            session.watch(frame)

    return Job(watch, len(frames))


def take_turns(jobs: Mapping[Key, Job], rounds: int) -> dict[Key, list[Took]]:
    """Time every job once per round, after a warm-up round whose times are discarded."""
    took: dict[Key, list[Took]] = {key: [] for key in jobs}
    for done in range(rounds + 1):
        show(f"round {done} of {rounds}" if done else "warming up")
        for key, job in jobs.items():
            took[key].append(time_job(job))
    return {key: times[1:] for key, times in took.items()}


def spread(values: Iterable[float], median: str, low: str = "low", high: str = "high", digits: int = 3) -> dict[str, Any]:
    """Return the median and quartiles of values under the given names, or None for all three if there are no values."""
    return _quantiles(values, {median: 50, low: 25, high: 75}, digits)


def percentiles(values: Iterable[float], name: str, percents: Sequence[int] = (50, 95, 99)) -> dict[str, Any]:
    """Return percentiles of values as ``NAME_p50`` and so on. If there are no values, every percentile is None."""
    return _quantiles(values, {f"{name}_p{percent}": percent for percent in percents}, 3)


def _quantiles(values: Iterable[float], names: Mapping[str, int], digits: int) -> dict[str, Any]:
    known = list(values)
    found = np.percentile(known, list(names.values())) if known else [None] * len(names)
    return {name: None if x is None else round(float(x), digits) for name, x in zip(names, found, strict=True)}


def figures(unit: str, took: Sequence[Took]) -> dict[str, Any]:
    """Return ``ms_per_UNIT`` (wall clock) with its quartiles ``low`` and ``high``, and ``cpu_ms_per_UNIT``."""
    cpu = statistics.median(once.cpu for once in took)
    return {**spread([once.wall for once in took], f"ms_per_{unit}"), f"cpu_ms_per_{unit}": round(cpu, 3)}


def ratio(ours: Sequence[Took], theirs: Sequence[Took], name: str = "ratio") -> dict[str, Any]:
    """Return statistics of the ratio of our time to theirs in each round.

    ``name`` is the median, ``low`` and ``high`` are the quartiles, and ``cpu_ratio`` is the median ratio of processor times.
    """
    pairs = list(zip(ours, theirs, strict=True))
    cpu = statistics.median(one.cpu / other.cpu for one, other in pairs)
    return {**spread((one.wall / other.wall for one, other in pairs), name), "cpu_ratio": round(cpu, 3)}


def parts_ms(session: Session) -> dict[str, float]:
    """Return the milliseconds spent so far in the vision tower, in prefill and in compression."""
    memory = session.stats.memory
    return {
        "vision_ms": session.stats.encode_ms,
        "prefill_ms": memory.prefill_ms,
        "compress_ms": memory.compress_ms + memory.reindex_ms,
    }
