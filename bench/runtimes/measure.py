"""The runtimes of a bench at the same work, in turn."""

from __future__ import annotations

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
    """One runtime's rounds, and ours of the same rounds."""

    runtime: str
    precision: str
    work: Work
    took: Sequence[Took]
    ours: Sequence[Took]


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
        for work in sorted(works, key=lambda work: (work.held, work.rows)):
            for name, runtime in runtimes.items():
                progress(f"{name}: holding {work.held:,} rows")
                runtime.hold(work.held)
            took = in_turn({name: _job(runtime, work) for name, runtime in runtimes.items()}, rounds)
            yield from (Result(name, precision, work, took[name], took[OURS]) for name in runtimes)


def _present(names: Sequence[str], precision: str, progress: Progress) -> list[str]:
    present = []
    for name in names:
        why = missing(name)
        if why is None and precision not in RUNTIMES[name][2]:
            why = f"{name} is left out of {precision}, which it does not have here"
        if why is None:
            present.append(name)
        else:
            progress(why)
    return present


def _job(runtime: Runtime, work: Work) -> Job:
    return Job(partial(runtime.append, [0] * work.rows, scores=work.rows == 1), work.frames, runtime.forget)
