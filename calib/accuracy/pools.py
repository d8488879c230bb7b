"""Pools that do pieces of work in several processes, on this machine or on a Ray cluster's."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from typing import Any, Protocol, TypeVar

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.packages import needs

Work = TypeVar("Work")
Done = TypeVar("Done")
MakePerform = Callable[[], Callable[[Work], Done]]

LOCAL = "local"  # in place of a cluster's address: start one on this machine
TRIES = 3  # workers that may die of a piece of work before it is given up
WAIT_S = 120.0  # for the first free processor of a cluster
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
OBJECTS = 80_000_000  # bytes of Ray's object store, about the least it takes


class Pool(Protocol):
    def map(
        self, perform: Callable[[Work], Done], make_perform: MakePerform[Work, Done], tasks: Iterable[Work]
    ) -> Iterator[Done]:
        """Yield each task's result as it is done, in any order. Raises UserError where tasks cannot be done.

        perform: used in this process; make_perform: called once by each worker process.
        """


@dataclass(frozen=True, slots=True)
class Processes:
    """This process, or ``workers`` others. A worker that dies ends the work."""

    workers: int = 1

    def map(
        self, perform: Callable[[Work], Done], make_perform: MakePerform[Work, Done], tasks: Iterable[Work]
    ) -> Iterator[Done]:
        if self.workers == 1:
            yield from map(perform, tasks)
            return
        pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _start_process, (make_perform,))
        try:
            for done in as_completed([pool.submit(_perform_in_process, task) for task in tasks]):
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

_perform: Callable[[Any], Any] | None = None


def _start_process(make_perform: MakePerform[Any, Any]) -> None:
    global _perform
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    _perform = make_perform()


def _perform_in_process(task: Any) -> Any:
    assert _perform is not None
    return _perform(task)


@dataclass(frozen=True, slots=True)
class RayTasks:
    """Tasks on a Ray cluster, one a processor at a time; Ray gives the task of a worker that dies to another worker.

    address: HOST:PORT, or ``local``. workers: by default as many as the cluster has processors. memory: bytes of each.
    environment: variables for Ray.
    """

    address: str
    workers: int | None = None
    memory: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def map(
        self, perform: Callable[[Work], Done], make_perform: MakePerform[Work, Done], tasks: Iterable[Work]
    ) -> Iterator[Done]:
        todo = deque(tasks)
        if not todo:
            return
        with self._connected() as ray:
            needed = {"num_cpus": 1, "memory": self.memory or None, "max_retries": TRIES - 1}
            on_node = ray.remote(_perform_on_node).options(**needed)
            try:
                ray.get(ray.remote(_begin).options(**needed).remote(__version__), timeout=WAIT_S)
                most = self.workers or int(ray.cluster_resources().get("CPU", 1))
                busy: list[Any] = []
                while todo or busy:
                    while todo and len(busy) < most:
                        busy.append(on_node.remote(__version__, make_perform, todo.popleft()))
                    (done,), busy = ray.wait(busy)
                    yield ray.get(done)
            except UserError as error:  # Ray's error is of the cause's class too
                raise UserError(str(getattr(error, "cause", error))) from None
            except ray.exceptions.GetTimeoutError:
                raise UserError(f"--cluster {self.address}: no processor was free for {WAIT_S:g} s; see ray status") from None
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.ObjectLostError):
                raise UserError(
                    f"--cluster {self.address}: {TRIES} workers died of the same piece of work, perhaps for want of memory; "
                    "give fewer --workers, and --resume with --out"
                ) from None

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yield Ray, connected. Raises UserError where there is none."""
        os.environ |= {**QUIET, **self.environment}
        with needs("--cluster", "cluster"):
            import ray
        own: dict[str, Any] = {}
        if self.address == LOCAL:
            own = {"num_cpus": self.workers, "object_store_memory": OBJECTS, "include_dashboard": False}
        try:
            ray.init(self.address, log_to_driver=False, logging_level="fatal", **own)
        except Exception as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"--cluster {self.address}: cannot be joined ({why}); that of edgevlm serve wants its --key-file"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _begin(version: str) -> None:
    """Raise UserError for another edgevlm than the caller's, whose results may differ."""
    if version != __version__:
        raise UserError(f"--cluster: {os.uname().nodename} has edgevlm {__version__}, and this machine {version}")


def _perform_on_node(version: str, make_perform: MakePerform[Any, Any], task: Any) -> Any:
    """Perform a task; a worker process, which serves one :meth:`RayTasks.map`, makes its ``perform`` with its first."""
    global _perform
    if _perform is None:
        _begin(version)
        _perform = make_perform()
    return _perform(task)
