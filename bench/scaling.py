"""``edgevlm bench cluster scaling``: how long sharded work takes on so many workers, measured and by a model of it."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from edgevlm.bench.output import Line
from edgevlm.calib.accuracy.pools import LOCAL, RayTasks
from edgevlm.calib.accuracy.variants import VariantRun, parse_budgets, parse_variants
from edgevlm.calib.accuracy.worker import AccuracySettings, CaseTask, Worker, make_worker
from edgevlm.errors import UserError
from edgevlm.progress import Notify

PREDICTED = (4, 8, 16, 32, 64, 128)


def scaling(
    streams: int = 10,
    frames: int = 64,
    policy: Sequence[str] = ("infinipot-v", "last-seen", "sliding-window"),
    budget: str = "12.5%",
    workers: str = "1,2",
    cluster: str = LOCAL,
    progress: Notify = lambda words: None,
) -> Iterator[Line]:
    """A line for each number of ``workers``, by which ``bench accuracy --cluster`` was timed, and for more that are predicted.

    The model: Ray and the workers start; then each worker takes the next piece when it has done one, and a piece takes as long
    as it took one worker, with its share of what went by between pieces. What is measured on more workers checks it. Raises
    UserError.
    """
    try:
        counts = [int(each) for each in workers.split(",")]
        if counts != sorted(set(counts)) or counts[0] != 1:
            raise ValueError
    except ValueError:
        raise UserError(f"--workers {workers}: give rising numbers that begin with 1, like 1,2") from None
    progress("budgets of equal bytes")
    worker = Worker(AccuracySettings(frames=frames))
    variants = parse_variants(list(policy))
    found = [worker.ceiling(), *(run for each in parse_budgets(budget) for run in worker.runs(variants, each))]
    tasks = [CaseTask(run, stream) for stream in range(streams) for run in found if isinstance(run, VariantRun)]
    start_s, pieces, alone = 0.0, [0.0] * len(tasks), 0.0
    for count in [*counts, *(each for each in PREDICTED if each > counts[-1])]:
        wall_s = None
        if count in counts:
            progress(f"{len(tasks)} pieces on {count} workers")
            wall_s, first_s, taken = timed(RayTasks(cluster, count), worker, tasks)
        if count == 1 and wall_s is not None:
            between = (wall_s - first_s - sum(taken)) / len(tasks)
            start_s, pieces, alone = first_s, [seconds + between for seconds in taken], wall_s
        predicted = start_s + makespan(pieces, count)
        yield {
            "bench": "cluster-scaling", "workers": count, "pieces": len(tasks), "start_s": round(start_s, 2),
            "wall_s": None if wall_s is None else round(wall_s, 2), "predicted_s": round(predicted, 2),
            "speedup": round(alone / (wall_s or predicted), 2),
            "error": None if wall_s is None or count == 1 else round(predicted / wall_s - 1, 3),
        }  # fmt: skip


def timed(pool: RayTasks, worker: Worker, tasks: Sequence[CaseTask]) -> tuple[float, float, list[float]]:
    """Seconds of all, until the first piece began, and of each piece, in the order of ``tasks``."""
    began = time.time()
    make = partial(_timed, partial(make_worker, worker.settings, worker.identity))
    done = sorted(pool.map(_timed(lambda: worker.perform), make, enumerate(tasks)))
    return time.time() - began, min(start for _, start, _ in done) - began, [seconds for _, _, seconds in done]


def _timed(make: Callable[[], Callable[[CaseTask], Any]]) -> Callable[[tuple[int, CaseTask]], tuple[int, float, float]]:
    perform = make()

    def timed(numbered: tuple[int, CaseTask]) -> tuple[int, float, float]:
        number, task = numbered
        start, began = time.time(), time.perf_counter()
        perform(task)
        return number, start, time.perf_counter() - began

    return timed


def makespan(pieces: Sequence[float], workers: int) -> float:
    """Seconds until all are done, where each is taken in turn by whoever is free first."""
    free = [0.0] * workers
    for seconds in pieces:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)
