"""What a service manager hears: sd_notify(3) messages, and whether a run makes progress."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from edgevlm.apps.sources import Source, State


class Notifier:
    """Writes to the socket that ``NOTIFY_SOCKET`` names: a path, or ``@name`` in the abstract namespace.

    Silent without one, and where nobody listens any more: no run ends or waits for its manager's sake. ``watched``: the manager
    wants to hear :meth:`alive` from this process (``WATCHDOG_USEC``, ``WATCHDOG_PID``).
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watched = bool(self._address) and mine and environment.get("WATCHDOG_USEC", "").isdigit()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None

    def ready(self) -> None:
        """Started: the first frame has been watched."""
        self._send("READY=1")

    def starting(self, seconds: float) -> None:
        """Not started yet, and not hung: give it this much longer from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """Sets the manager's watchdog back, where it has one."""
        if self.watched:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send("STATUS=" + " ".join(text.split()))

    def stopping(self) -> None:
        """What still happens is the end."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        with suppress(OSError):
            self._socket.sendto(message.encode(errors="replace"), socket.MSG_DONTWAIT, self._address)


START_S = 120.0  # that each sign of life before the first frame gives the start


class Watchdog:
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
