"""Pieces of work that many processes do: of this machine, or of a Ray cluster's machines."""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
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

LOCAL = "local"  # in place of a cluster's address: start one on this machine
TRIES = 3  # workers that a piece of work may take with it, before it is given up
WAIT_S = 120.0  # for the first worker of a cluster
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
OBJECTS = 80_000_000  # bytes of Ray's object store, about the least it takes


class Pool(Protocol):
    """What does pieces of work."""

    def map(
        self, perform: Callable[[Work], Done], make_perform: Callable[[], Callable[[Work], Done]], tasks: Iterable[Work]
    ) -> Iterator[Done]:
        """Results as they are done, each task once, in any order: by ``perform`` where this process does them, else by
        workers, each with its own ``make_perform()``. Raises UserError where they cannot be done.
        """


@dataclass(frozen=True, slots=True)
class Processes:
    """This process, or ``workers`` others. A worker that dies ends the work."""

    workers: int = 1

    def map(
        self, perform: Callable[[Work], Done], make_perform: Callable[[], Callable[[Work], Done]], tasks: Iterable[Work]
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
            for process in active_children():  # a piece of work takes longer than anybody who pressed ctrl-C waits
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


HERE = Processes()

_perform: Callable[[Any], Any]


def _start_process(make_perform: Callable[[], Callable[[Any], Any]]) -> None:
    """In a worker, once: ctrl-C is the parent's business."""
    global _perform
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _perform = make_perform()


def _perform_in_process(task: Any) -> Any:
    return _perform(task)


@dataclass(frozen=True, slots=True)
class RayActors:
    """Workers on a Ray cluster's machines, one a processor. What a worker that dies had at hand is given to another.

    address: HOST:PORT, or ``local``. workers: as many as the cluster has processors unless given; those that find none free
    begin when there is one. memory: bytes that each is to find on its machine. environment: variables that Ray reads.
    """

    address: str
    workers: int | None = None
    memory: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def map(
        self, perform: Callable[[Work], Done], make_perform: Callable[[], Callable[[Work], Done]], tasks: Iterable[Work]
    ) -> Iterator[Done]:
        todo = deque(enumerate(tasks))
        if not todo:
            return
        with self._connected() as ray:
            kind = ray.remote(WorkerActor).options(num_cpus=1, memory=self.memory or None)
            busy: dict[Any, tuple[Any, tuple[int, Work] | None]] = {}  # by what a worker will answer: it, and its task

            def begin() -> None:
                worker = kind.remote()
                busy[worker.begin.remote(__version__, make_perform)] = worker, None

            for _ in range(min(self.workers or int(ray.cluster_resources().get("CPU", 1)), len(todo))):
                begin()
            deaths: Counter[int | None] = Counter()  # by task; of workers that died as they began, under None
            while todo or any(task is not None for _, task in busy.values()):
                is_waiting = all(task is None for _, task in busy.values())
                answers, _ = ray.wait(list(busy), timeout=WAIT_S if is_waiting else None)
                if not answers:
                    raise UserError(f"--cluster {self.address}: no processor was free for {WAIT_S:g} s; see ray status")
                (answer,) = answers
                worker, task = busy.pop(answer)
                try:
                    done = ray.get(answer)
                except UserError as error:  # Ray's error is one of the cause's kind too
                    raise UserError(str(getattr(error, "cause", error))) from None
                except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
                    number = None if task is None else task[0]
                    deaths[number] += 1
                    if deaths[number] == TRIES:
                        which = "as they began" if task is None else "of the same piece of work"
                        raise UserError(
                            f"--cluster {self.address}: {TRIES} workers died {which}, perhaps for want of memory; "
                            "give fewer --workers, and --resume with --out"
                        ) from None
                    if task is not None:
                        todo.appendleft(task)
                    begin()
                    continue
                deaths[None] = 0
                if todo:
                    following = todo.popleft()
                    busy[worker.perform.remote(following[1])] = worker, following
                del worker  # else it would hold its processor when there is nothing left for it
                if task is not None:
                    yield done

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Ray, until the end of the block. Raises UserError where there is none."""
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


class WorkerActor:
    """A worker as a Ray actor."""

    def begin(self, version: str, make_perform: Callable[[], Callable[[Any], Any]]) -> None:
        """Raises UserError for another edgevlm than the one that asks: its results may be others."""
        if version != __version__:
            raise UserError(f"--cluster: {os.uname().nodename} has edgevlm {__version__}, and this machine {version}")
        self._perform = make_perform()

    def perform(self, task: Any) -> Any:
        return self._perform(task)
