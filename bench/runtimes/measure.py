"""The runtimes of a bench at the same work, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from edgevlm.bench.rounds import Job, Took, in_turn
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
class Result:
    """One runtime's rounds, with weights of one precision and keys and values of another."""

    runtime: str
    precision: str
    kv: str
    work: Work
    took: Sequence[Took]


def measure(
    model: TextModel,
    against: Sequence[str],
    precision: str,
    works: Sequence[Work],
    threads: int,
    rounds: int,
    progress: Progress,
    kinds: Sequence[str] = ("fp32",),
) -> Iterator[Result]:
    """Ours and each of ``against`` that is installed and has ``precision``, with each of ``kinds`` of memory that it has.

    At each of ``works``, least held first. All are loaded at once and take turns. ``progress`` is told of one that is left out.
    """
    capacity = max(work.held + work.rows for work in works)
    with ExitStack() as stack:
        runtimes: dict[tuple[str, str], Runtime] = {}
        for name in _present([OURS, *against], precision, progress):
            for kv in kinds:
                if kv in RUNTIMES[name][3]:
                    progress(f"{name}: {precision} weights of {model.name}, {kv} keys and values")
                    runtimes[name, kv] = start(name, model, precision, threads, capacity, kv)
                    stack.callback(runtimes[name, kv].close)
        for work in sorted(works, key=lambda work: (work.held, work.rows)):
            for (name, kv), runtime in runtimes.items():
                progress(f"{name}: holding {work.held:,} rows of {kv}")
                runtime.hold(work.held)
            took = in_turn({key: _job(runtime, work) for key, runtime in runtimes.items()}, rounds)
            yield from (Result(name, precision, kv, work, took[name, kv]) for name, kv in runtimes)


def compared(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Ours beside each other's of the same rounds: with the same keys and values, then the fastest of ours and of theirs."""
    for precision, work in dict.fromkeys((result.precision, result.work) for result in results):
        rounds = [result for result in results if (result.precision, result.work) == (precision, work)]
        ours = {result.kv: result for result in rounds if result.runtime == OURS}
        for name in dict.fromkeys(result.runtime for result in rounds if result.runtime != OURS):
            theirs = {result.kv: result for result in rounds if result.runtime == name}
            yield from ((ours[kv], other) for kv, other in theirs.items() if kv in ours)
            one, other = (min(kinds.values(), key=_median) for kinds in (ours, theirs))
            if one.kv != other.kv:
                yield one, other


def _median(result: Result) -> float:
    return statistics.median(took.wall for took in result.took)


def _present(names: Sequence[str], precision: str, progress: Progress) -> list[str]:
    present = []
    for name in names:
        why = missing(name)
        if why is None and precision not in RUNTIMES[name][2]:
            why = f"{name} is left out of {precision} weights, which it does not have here"
        if why is None:
            present.append(name)
        else:
            progress(why)
    return present


def _job(runtime: Runtime, work: Work) -> Job:
    return Job(partial(runtime.append, [0] * work.rows, scores=work.rows == 1), work.frames, runtime.forget)
