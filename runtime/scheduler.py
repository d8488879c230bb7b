"""Who may touch the stream next: questions in the order asked, and the watcher when no question waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """One at a time. A question takes its place when asked and goes before any later chunk."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions: deque[object] = deque()
        self._busy = False

    def queue(self) -> object:
        """Take a place for a question, at once; enter it later with :meth:`question`."""
        ticket = object()
        with self._changed:
            self._questions.append(ticket)
        return ticket

    def leave(self, ticket: object) -> None:
        """Give back a place that will not be entered."""
        with self._changed:
            self._questions.remove(ticket)
            self._changed.notify_all()

    @contextmanager
    def question(self, ticket: object) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and self._questions[0] is ticket)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._questions.popleft()
                self._busy = False
                self._changed.notify_all()

    @contextmanager
    def watcher(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._questions)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Questions asked and not yet finished."""
        return len(self._questions)
