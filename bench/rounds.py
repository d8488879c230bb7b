"""Jobs in turn, round by round: what each takes, and how much of another's time one takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Job:
    """``run`` is timed and its time divided by ``count``; ``after`` is not timed."""

    run: Callable[[], object]
    count: int = 1
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Took:
    """Milliseconds of one of ``count``: by the clock on the wall, and of the processor, all threads together."""

    wall: float
    cpu: float


def in_turn(jobs: Mapping[Key, Job], rounds: int) -> dict[Key, list[Took]]:
    """Every job once a round, after a first round that does not count."""
    took: dict[Key, list[Took]] = {key: [] for key in jobs}
    for _ in range(rounds + 1):
        for key, job in jobs.items():
            took[key].append(_once(job))
    return {key: times[1:] for key, times in took.items()}


def _once(job: Job) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    job.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    job.after()
    return Took(1e3 * wall / job.count, 1e3 * cpu / job.count)


def figures(unit: str, took: Sequence[Took]) -> dict[str, Any]:
    """Median and quartiles of the wall's milliseconds, and the processor's median, per ``unit``."""
    low, median, high = quartiles([once.wall for once in took])
    cpu = statistics.median(once.cpu for once in took)
    named = {f"ms_per_{unit}": median, "low": low, "high": high, f"cpu_ms_per_{unit}": cpu}
    return {name: round(value, 3) for name, value in named.items()}


def ratio(ours: Sequence[Took], others: Sequence[Took]) -> dict[str, Any]:
    """Ours over another's, round by round: median and quartiles on the wall's clock, and the median of the processor's time."""
    pairs = list(zip(ours, others, strict=True))
    low, median, high = quartiles([one.wall / other.wall for one, other in pairs])
    cpu = statistics.median(one.cpu / other.cpu for one, other in pairs)
    named = {"ratio": median, "low": low, "high": high, "cpu_ratio": cpu}
    return {name: round(value, 3) for name, value in named.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
