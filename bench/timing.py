"""Timing: jobs in turn, medians with quartiles, ratios round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edgevlm.progress import Notify

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Job:
    """``run`` is timed and its time divided by ``count``; ``after`` is not timed."""

    run: Callable[[], object]
    count: int = 1
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Took:
    """Milliseconds per item: wall-clock time, and processor time of all threads together."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def time_job(job: Job) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    job.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    job.after()
    return Took(1e3 * wall / job.count, 1e3 * cpu / job.count)


def take_turns(jobs: Mapping[Key, Job], rounds: int, progress: Notify = lambda what: None) -> dict[Key, list[Took]]:
    """Run every job once a round; a first round warms up and is not counted."""
    took: dict[Key, list[Took]] = {key: [] for key in jobs}
    for done in range(rounds + 1):
        progress(f"round {done} of {rounds}" if done else "warming up")
        for key, job in jobs.items():
            took[key].append(time_job(job))
    return {key: times[1:] for key, times in took.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def spread(values: Sequence[float], median: str, low: str = "low", high: str = "high", digits: int = 3) -> dict[str, Any]:
    """Median and quartiles under these names; None without values."""
    found = quartiles(values) if values else (None, None, None)
    return {
        name: None if x is None else round(x, digits)
        for name, x in zip((median, low, high), (found[1], found[0], found[2]), strict=True)
    }


def figures(unit: str, took: Sequence[Took]) -> dict[str, Any]:
    """``ms_per_UNIT`` with ``low`` and ``high`` of the wall clock, and ``cpu_ms_per_UNIT``."""
    cpu = statistics.median(once.cpu for once in took)
    return {**spread([once.wall for once in took], f"ms_per_{unit}"), f"cpu_ms_per_{unit}": round(cpu, 3)}


def ratio(ours: Sequence[Took], theirs: Sequence[Took]) -> dict[str, Any]:
    """Our time over theirs, round by round: ``ratio`` with ``low`` and ``high``, and ``cpu_ratio`` of processor time."""
    pairs = list(zip(ours, theirs, strict=True))
    cpu = statistics.median(one.cpu / other.cpu for one, other in pairs)
    return {**spread([one.wall / other.wall for one, other in pairs], "ratio"), "cpu_ratio": round(cpu, 3)}
