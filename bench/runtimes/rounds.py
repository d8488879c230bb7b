"""Runtimes in turn: what each takes for the same work, and how much of another's time ours takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from edgevlm.bench.runtimes import OURS, RUNTIMES, Runtime, missing, start
from edgevlm.bench.runtimes.text_model import TextModel
from edgevlm.runtime.bundle import Progress


@dataclass(frozen=True, slots=True)
class Work:
    """``rows`` decoded after ``held`` others, ``frames`` of them together; of a single row the logits too."""

    held: int
    rows: int = 1
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Took:
    """Milliseconds of a token or a frame: by the clock on the wall, and of the processor, all threads together."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Result:
    """One runtime's rounds, and ours of the same rounds."""

    runtime: str
    precision: str
    work: Work
    took: Sequence[Took]
    ours: Sequence[Took]

    def figures(self, unit: str) -> dict[str, Any]:
        """Median and quartiles of the wall's milliseconds, and the processor's median, per ``unit``."""
        low, median, high = quartiles([once.wall for once in self.took])
        cpu = statistics.median(once.cpu for once in self.took)
        figures = {f"ms_per_{unit}": median, "low": low, "high": high, f"cpu_ms_per_{unit}": cpu}
        return {name: round(value, 3) for name, value in figures.items()}

    def ratio(self) -> dict[str, Any]:
        """Ours over this runtime's, round by round: median and quartiles, and the median of the processor's time."""
        pairs = list(zip(self.ours, self.took, strict=True))
        low, median, high = quartiles([ours.wall / other.wall for ours, other in pairs])
        cpu = statistics.median(ours.cpu / other.cpu for ours, other in pairs)
        return {name: round(value, 3) for name, value in zip(RATIO, (median, low, high, cpu), strict=True)}


RATIO = ("ratio", "low", "high", "cpu_ratio")


def measure(
    model: TextModel,
    against: Sequence[str],
    precision: str,
    works: Sequence[Work],
    threads: int,
    rounds: int,
    progress: Progress,
) -> Iterator[Result]:
    """Ours and each of ``against`` that is installed and has ``precision``, for each of ``works``, from the least held on.

    All are loaded at once and take turns. ``progress`` is told of one that is left out.
    """
    capacity = max(work.held + work.rows for work in works)
    with ExitStack() as stack:
        runtimes: dict[str, Runtime] = {}
        for name in _present([OURS, *against], precision, progress):
            progress(f"{name}: {precision} weights of {model.name}")
            runtimes[name] = start(name, model, precision, threads, capacity)
            stack.callback(runtimes[name].close)
        for work in sorted(works, key=lambda work: work.held):
            took = _in_turn(runtimes, work, rounds, progress)
            yield from (Result(name, precision, work, took[name], took[OURS]) for name in runtimes)


def _present(names: Sequence[str], precision: str, progress: Progress) -> list[str]:
    present = []
    for name in names:
        why = missing(name)
        if why is None and precision not in RUNTIMES[name][2]:
            why = f"{name} has no {precision} here"
        if why is None:
            present.append(name)
        else:
            progress(why)
    return present


def _in_turn(runtimes: dict[str, Runtime], work: Work, rounds: int, progress: Progress) -> dict[str, list[Took]]:
    for name, runtime in runtimes.items():
        progress(f"{name}: holding {work.held:,} rows")
        runtime.hold(work.held)
    took: dict[str, list[Took]] = {name: [] for name in runtimes}
    for _ in range(rounds + 1):
        for name, runtime in runtimes.items():
            took[name].append(_once(runtime, work))
    return {name: times[1:] for name, times in took.items()}  # the first does not count


def _once(runtime: Runtime, work: Work) -> Took:
    ids = [0] * work.rows
    wall, cpu = time.perf_counter(), time.process_time()
    runtime.append(ids, scores=work.rows == 1)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    runtime.forget()
    return Took(1e3 * wall / work.frames, 1e3 * cpu / work.frames)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, median, high
