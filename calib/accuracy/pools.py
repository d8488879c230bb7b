"""Run tasks in this process or in several worker processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, Protocol

from edgevlm.errors import UserError


class PoolWorker(Protocol):
    def perform(self, task: Any) -> Any: ...


_worker: PoolWorker | None = None  # set in worker processes only


def in_processes(workers: int, here: PoolWorker, make: Callable[[], PoolWorker], tasks: Iterable[Any]) -> Iterator[Any]:
    """Run the tasks and yield the results as they arrive, in any order. Raises UserError if a worker is killed.

    With one worker, ``here.perform`` runs the tasks in this process. Otherwise each process calls ``make`` to get its worker.
    """
    if workers == 1:
        yield from map(here.perform, tasks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (make,))
    try:
        for done in as_completed([pool.submit(_work, task) for task in tasks]):
            yield done.result()
    except BrokenProcessPool:
        raise UserError("a worker was killed, perhaps for lack of memory; reduce --workers and add --resume") from None
    except BaseException:
        for process in active_children():  # do not let Ctrl-C wait for running tasks
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(make: Callable[[], PoolWorker]) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    _worker = make()


def _work(task: Any) -> Any:
    assert _worker is not None
    return _worker.perform(task)
