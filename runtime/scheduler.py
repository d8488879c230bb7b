"""One thread that runs all work on a model, for any number of sessions."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeVar

from edgevlm.errors import UserError

T = TypeVar("T")


class Task(NamedTuple):
    """A call that waits for its turn, and where its result goes."""

    session: object
    future: Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        """Call it, unless it was cancelled; an error goes to the future too."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call(*self.arguments)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Scheduler:
    """Runs one task at a time: urgent ones first, in the order submitted, then those of the sessions in turn.

    Between two urgent tasks one of a session that waits for no urgent one has its turn: a camera that is asked without end does
    not stop the others. Engine, caches and policies of a model are touched by this thread alone, so nothing else needs a lock.
    The thread starts with the first task.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[Task] = deque()
        self._queues: dict[object, deque[Task]] = {}  # of sessions with tasks, the one served longest ago first
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._was_urgent = False  # the task before

    @property
    def waiting(self) -> int:
        """Tasks that have not begun."""
        with self._changed:
            tasks = [*self._urgent, *(task for queue in self._queues.values() for task in queue)]
        return sum(not task.future.cancelled() for task in tasks)

    def submit(self, session: object, call: Callable[..., T], *arguments: Any, urgent: bool = False) -> Future[T]:
        """Queue a call. Cancelling the future takes it out again, until it begins.

        Raises UserError after :meth:`stop`, and when the system starts no thread.
        """
        task = Task(session, Future(), call, arguments)
        with self._changed:
            if self._stopped:
                raise UserError("the model is closed; load it again")
            self._start()
            (self._urgent if urgent else self._queues.setdefault(session, deque())).append(task)
            self._changed.notify()
        return task.future

    def run(self, session: object, call: Callable[..., T], *arguments: Any, urgent: bool = False) -> T:
        """Queue a call and wait for its result; raises what it raises.

        An interrupt of the waiting thread takes back a call that has not begun, and lets one that has come to its end.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("the model's own thread cannot wait for the model: call this from another thread")
        future = self.submit(session, call, *arguments, urgent=urgent)
        try:
            return future.result()
        except CancelledError:
            raise UserError("the model is closed; load it again") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what waits, and end the thread after the task it runs."""
        with self._changed:
            self._stopped = True
            waiting = [*self._urgent, *(task for queue in self._queues.values() for task in queue)]
            self._urgent.clear()
            self._queues.clear()
            self._changed.notify()
        for task in waiting:
            task.future.cancel()

    def close(self) -> None:
        """:meth:`stop`, and wait for the thread's end."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="edgevlm-model", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise UserError(f"a model needs a thread of its own ({error}); end other programs and try again") from None
            self._thread = thread

    def _serve(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Run the next task; False after :meth:`stop`. Holds on to no task while it waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._queues or self._stopped)
            if self._stopped:
                return False
            task = self._next()
        task.run()
        return True

    def _next(self) -> Task:
        asking = {task.session for task in self._urgent if not task.future.cancelled()}
        session = next((each for each in self._queues if each not in asking), None)
        if self._urgent and (session is None or not self._was_urgent):
            self._was_urgent = True
            return self._urgent.popleft()
        self._was_urgent = False
        queue = self._queues.pop(session)
        task = queue.popleft()
        if queue:
            self._queues[session] = queue  # behind the others
        return task
