"""Does pieces of work in this process or in several others."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from edgevlm.errors import UserError

Work = TypeVar("Work")
Done = TypeVar("Done")
_perform: Callable[[Any], Any] | None = None  # in a worker process


@dataclass(frozen=True, slots=True)
class Processes:
    """This process, or ``workers`` others. A worker that dies ends the work."""

    workers: int = 1

    def map(
        self, perform: Callable[[Work], Done], make_perform: Callable[[], Callable[[Work], Done]], tasks: Iterable[Work]
    ) -> Iterator[Done]:
        """Yield each task's result as it is done, in any order. Raises UserError where a worker is killed.

        perform: used in this process; make_perform: called once by each worker process.
        """
        if self.workers == 1:
            yield from map(perform, tasks)
            return
        pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _start, (make_perform,))
        try:
            for done in as_completed([pool.submit(_work, task) for task in tasks]):
                yield done.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker was killed, perhaps for want of memory; give fewer --workers, and --resume with --out"
            ) from None
        except BaseException:
            for process in active_children():  # ctrl-C does not wait for work in progress
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


HERE = Processes()


def _start(make_perform: Callable[[], Callable[[Any], Any]]) -> None:
    global _perform
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    _perform = make_perform()


def _work(task: Any) -> Any:
    assert _perform is not None
    return _perform(task)
