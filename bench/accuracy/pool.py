"""Work spread over processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from edgevlm.errors import UserError

Work = TypeVar("Work")
Done = TypeVar("Done")


def spread(
    perform: Callable[[Work], Done], seat: Callable[[], Callable[[Work], Done]], tasks: Iterable[Work], workers: int
) -> Iterator[Done]:
    """What is done, as it is: by ``perform`` in this process, or in ``workers`` others, each with what ``seat`` makes there.

    Raises UserError if a worker dies.
    """
    if workers == 1:
        yield from map(perform, tasks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _take_seat, (seat,))
    try:
        for done in as_completed([pool.submit(_perform, task) for task in tasks]):
            yield done.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker was killed, perhaps for want of memory; give fewer --workers, and --resume with --out"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_seat: Callable[[Any], Any]


def _take_seat(seat: Callable[[], Callable[[Any], Any]]) -> None:
    """In a worker, once: ctrl-C is the parent's business."""
    global _seat
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _seat = seat()


def _perform(task: Any) -> Any:
    return _seat(task)
