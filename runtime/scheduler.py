"""Run all work on a model in one thread, for any number of sessions."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeVar

from edgevlm.errors import NoThreads, UserError, refuse_fork

T = TypeVar("T")

PERIOD_S = 0.5
RETURN_S = 0.01  # how long to wait for the next task of the session that ran last, in seconds
WATCH_FRACTION = 0.15


class Task(NamedTuple):
    """A queued call and the future for its result.

    ``session``: the session's id. ``due``: when the call is due on the scheduler's clock. ``period``: the seconds between the
    session's tasks.
    """

    session: int
    due: float
    period: float
    future: Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    watch: bool = False

    def run(self) -> None:
        """Run the call unless it was cancelled, and store its result or its error in the future."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call(*self.arguments)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Scheduler:
    """Runs one task at a time: urgent tasks first, then watches, then the sessions' other tasks, the earliest deadline first.

    A session's task is due one period after the session's previous task. Under overload, every session runs at the same
    fraction of its rate (start-time fair queueing). A session that was idle gets no extra time later. After an urgent task, a
    waiting task that is not urgent runs next, so that endless questions to one camera do not stop the others. Watches take at
    most WATCH_FRACTION of the time: after a watch of t seconds, the next watch starts 5.7 t seconds later. Only the scheduler's
    thread uses a model's engine, caches and policies, so no lock is needed. The thread starts with the first task.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[Task] = deque()
        self._watches: deque[Task] = deque()
        self._watch_from = 0.0  # when the next watch may begin, by time.monotonic()
        self._queues: dict[int, deque[Task]] = {}
        self._clock = 0.0  # the largest ``due - period`` of the tasks that have begun
        self._due: dict[int, float] = {}
        self._returning: tuple[int, float] | None = None  # the session that ran last, and when its next task is due
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._pid = os.getpid()
        self._was_urgent = False  # whether the previous task was urgent

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the process that made the scheduler."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise UserError in a forked process, where the model's thread does not run and a lock may never be released."""
        refuse_fork(self._pid, "the model")

    @property
    def waiting(self) -> int:
        """The number of tasks that have not begun."""
        self.check_process()
        with self._changed:
            tasks = [*self._urgent, *self._watches, *(task for queue in self._queues.values() for task in queue)]
        return sum(not task.future.cancelled() for task in tasks)

    @property
    def urgent_waiting(self) -> bool:
        """Return whether an urgent task is waiting. A running watch then postpones its remaining questions."""
        with self._changed:
            return any(not task.future.cancelled() for task in self._urgent)

    def submit(
        self,
        session: object,
        call: Callable[..., T],
        *arguments: Any,
        urgent: bool = False,
        watch: bool = False,
        period: float = PERIOD_S,
    ) -> Future[T]:
        """Queue a call and return the future for its result. Cancelling the future removes a call that has not begun.

        ``urgent``: run the call before all others; used for users' questions. ``watch``: run the call after urgent calls; used
        for background questions. ``period``: the seconds between the session's tasks unless the model is overloaded. Raises
        UserError after :meth:`stop`, in a forked process, and if the system cannot start a thread.
        """
        self.check_process()
        with self._changed:
            if self._stopped:
                raise UserError("the model is closed; load it again")
            self._start()
            task = Task(id(session), self._next_due(id(session), period), period, Future(), call, arguments, watch)
            if urgent or watch:
                (self._urgent if urgent else self._watches).append(task)
            else:
                self._due = {known: due for known, due in self._due.items() if due > self._clock} | {task.session: task.due}
                self._queues.setdefault(task.session, deque()).append(task)
            self._changed.notify()
        return task.future

    def run(
        self,
        session: object,
        call: Callable[..., T],
        *arguments: Any,
        urgent: bool = False,
        watch: bool = False,
        period: float = PERIOD_S,
    ) -> T:
        """Queue a call, wait for it, and return its result or raise its error.

        If the waiting thread is interrupted, a call that has not begun is cancelled; a call that has begun runs to its end.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("the model's own thread cannot wait for the model: call this from another thread")
        future = self.submit(session, call, *arguments, urgent=urgent, watch=watch, period=period)
        try:
            return future.result()
        except CancelledError:
            raise UserError("the model is closed; load it again") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel all waiting tasks, and end the thread after the running task. Does nothing in a forked process."""
        if self.is_forked:
            return
        with self._changed:
            self._stopped = True
            waiting = [*self._urgent, *self._watches, *(task for queue in self._queues.values() for task in queue)]
            self._urgent.clear()
            self._watches.clear()
            self._queues.clear()
            self._changed.notify()
        for task in waiting:
            task.future.cancel()

    def close(self) -> None:
        """Stop the scheduler and wait for its thread to end."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def give_way(self, session: object, takes: Callable[[Task], bool]) -> None:
        """Run one task of each waiting session. A long task calls this method on the model's thread between two of its parts.

        ``session``: the long task's session. ``takes``: returns whether the next task of ``session`` may run now.
        """
        with self._changed:
            waiting = sorted(self._queues, key=lambda each: self._queues[each][0].due)
        for each in waiting:
            with self._changed:
                if each not in self._queues or (each == id(session) and not takes(self._queues[each][0])):
                    continue
                task = self._take(each)
            task.run()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="edgevlm-model", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                raise NoThreads from None
            self._thread = thread

    def _serve(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Run the next task. Return False after :meth:`stop`. While waiting, the thread holds no reference to a task."""
        with self._changed:
            while not (self._urgent or self._queues or self._stopped or self._watch_in_s == 0):
                self._changed.wait(self._watch_in_s)
            self._changed.wait_for(lambda: not self._returns(), RETURN_S)
            self._returning = None
            if self._stopped:
                return False
            task = self._next()
        began = time.monotonic()
        task.run()
        if task.watch:
            now = time.monotonic()
            self._watch_from = now + (now - began) * (1 / WATCH_FRACTION - 1)
        return True

    @property
    def _watch_in_s(self) -> float | None:
        """Return the seconds until the next watch may begin, or None if no watch is waiting."""
        return max(0.0, self._watch_from - time.monotonic()) if self._watches else None

    def _next_due(self, session: int, period: float) -> float:
        return max(self._clock, self._due.get(session, 0.0)) + period

    def _returns(self) -> bool:
        """Return whether the session that just ran should also run next, although its next task is not queued yet.

        The scheduler waits RETURN_S for that session. Without this wait, two sessions would alternate, whatever their rates.
        """
        if self._returning is None or self._urgent or self._stopped or self._watch_in_s == 0:
            return False
        session, due = self._returning
        return session not in self._queues and all(queue[0].due > due for queue in self._queues.values())

    def _next(self) -> Task:
        asking = {task.session for task in self._urgent if not task.future.cancelled()}
        session = min(
            (each for each in self._queues if each not in asking), key=lambda each: self._queues[each][0].due, default=None
        )
        watch = self._watch_in_s == 0
        if self._urgent and not (self._was_urgent and (watch or session is not None)):
            self._was_urgent = True
            return self._urgent.popleft()
        self._was_urgent = False
        if watch:
            return self._watches.popleft()
        assert session is not None
        return self._take(session)

    def _take(self, session: int) -> Task:
        queue = self._queues.pop(session)
        task = queue.popleft()
        if queue:
            self._queues[session] = queue  # the session now comes after all other sessions
        self._clock = max(self._clock, task.due - task.period)
        self._returning = session, self._next_due(session, task.period)
        return task
