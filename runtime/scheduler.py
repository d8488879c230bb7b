"""One thread that runs all work on a model, for any number of sessions."""

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

PERIOD_S = 0.5  # the default of a session
RETURN_S = 0.01  # that a session which is due next may take to come back with its next task
WATCH_FRACTION = 0.15  # of the time, that watches may take


class Task(NamedTuple):
    """A call that waits for its turn, with the future for its result.

    session: its id. due, period: seconds of the scheduler's clock.
    """

    session: int
    due: float
    period: float
    future: Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    watch: bool = False

    def run(self) -> None:
        """Run the call unless it was cancelled; an error goes to the future."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call(*self.arguments)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Scheduler:
    """Runs one task at a time: urgent ones first, in the order submitted, then watches, then those of the sessions by deadline.

    A session's task is due one period after its previous one, so in overload every session runs at the same fraction of its
    rate (start-time fair queueing); an idle session accumulates no credit.

    Between two urgent tasks, one task of a session without urgent ones runs, so endless questions to one camera do not stop the
    others. Watches, in the order submitted, take at most WATCH_FRACTION of the time: after one that took t s the next begins
    5.7 t later.

    Only this thread uses the engine, caches and policies of a model, so nothing else needs a lock. The thread starts
    with the first task.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[Task] = deque()
        self._watches: deque[Task] = deque()
        self._watch_from = 0.0  # time.monotonic() at which the next of them may begin
        self._queues: dict[int, deque[Task]] = {}  # of sessions with tasks, the one served longest ago first
        self._clock = (
            0.0  # when the newest task began that was not an urgent one, had all begun one period before they were due
        )
        self._due: dict[int, float] = {}  # when a session's newest task is due, where that is after the clock
        self._returning: tuple[int, float] | None = None  # the session of the task before, and when its next one is due
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._pid = os.getpid()
        self._was_urgent = False  # the task before

    @property
    def is_forked(self) -> bool:
        """Return whether this process was forked from the one with the thread."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise UserError in a forked process, which has no such thread and may hold a lock forever."""
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
        """Return whether an urgent task waits; a running watch may then postpone the rest of its questions."""
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
        """Queue a call.

        Cancelling the future removes it until it begins. urgent: run it first, as for questions. watch: background questions.
        period: seconds between tasks of the session, if there is time for all. Raises UserError after :meth:`stop`, in a forked
        process, and if the system cannot start a thread.
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
        """Queue a call and wait for its result; raises what it raises.

        An interrupt of the waiting thread cancels a call that has not begun; a call that has begun finishes first.
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
        """Cancel waiting tasks, and end the thread after the running one. Does nothing in a forked process."""
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
        """Call :meth:`stop`, and wait for the thread to end."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def give_way(self, session: object, takes: Callable[[Task], bool]) -> None:
        """Give each waiting session one turn; a task calls this on the model's thread between two of its parts.

        takes: whether a task of its own ``session`` may run now.
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
        """Run the next task; return False after :meth:`stop`. Holds no reference to a task while it waits."""
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
        """Return the seconds until a watch may begin; None if none waits."""
        return max(0.0, self._watch_from - time.monotonic()) if self._watches else None

    def _next_due(self, session: int, period: float) -> float:
        return max(self._clock, self._due.get(session, 0.0)) + period

    def _returns(self) -> bool:
        """Return whether the last session would also have the next turn if its next task were queued.

        Its thread may be about to queue it; without this check two sessions would alternate whatever their rates.
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
        """Take the next task of a session out of its queue."""
        queue = self._queues.pop(session)
        task = queue.popleft()
        if queue:
            self._queues[session] = queue  # behind the others
        self._clock = max(self._clock, task.due - task.period)
        self._returning = session, self._next_due(session, task.period)
        return task
