"""Whether a run gets on: what the watchdog of a service manager goes by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgevlm.apps.notify import Notifier
from edgevlm.apps.sources import Source, State

START_S = 120.0  # that each sign of life before the first frame gives the start


class Heartbeat:
    """Signs of life since it was last looked at, of a run that reads ``source``; the manager hears of them.

    A sign of life is a frame that was taken, a piece of an answer, or, while the run waits for its source, pictures that come
    from a camera without being wanted (``--fps`` below its rate) and one more attempt to connect to a camera that is away. None
    are: a call of the model that does not return, and a camera whose threads all hang in a driver, so that no new connection is
    opened. Then the manager's watchdog bites, which is right: only a new process helps.
    """

    def __init__(self, source: Source, notifier: Notifier) -> None:
        self._source, self._notifier = source, notifier
        self._steps = 0
        self._seen = (0, source.attempts)
        self._waiting = self._ready = False

    def step(self) -> None:
        """A frame was taken, or a piece of an answer came."""
        self._steps += 1

    def ready(self) -> None:
        """The first frame has been watched."""
        if not self._ready:
            self._ready = True
            self._notifier.ready()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The run waits for its source here."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def tell(self, status: str) -> None:
        """Call it about once a second, from any thread."""
        self._notifier.status(status)
        if not self._gets_on():
            return
        if self._ready:
            self._notifier.alive()
        else:
            self._notifier.starting(START_S)

    def stopping(self) -> None:
        self._notifier.stopping()

    def _gets_on(self) -> bool:
        before, self._seen = self._seen, (self._steps, self._source.attempts)
        if self._steps != before[0]:
            return True
        running = self._source.live and self._source.state is State.RUNNING
        return self._waiting and (running or self._source.attempts != before[1])
