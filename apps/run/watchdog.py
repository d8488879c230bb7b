"""Whether a run makes progress: sd_notify(3) messages for a service manager, and lines about the source."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from edgevlm.apps.sources import Source, State


class Notifier:
    """Writes to the socket that ``NOTIFY_SOCKET`` names: a path, or ``@name`` in the abstract namespace.

    Silent without one, and where nobody listens: no run waits for its manager. ``watched``: the manager wants :meth:`alive`
    from this process (``WATCHDOG_USEC``, ``WATCHDOG_PID``).
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watched = bool(self._address) and mine and environment.get("WATCHDOG_USEC", "").isdigit()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None

    def ready(self) -> None:
        """Report the start's end: the first frame has been watched."""
        self._send("READY=1")

    def starting(self, seconds: float) -> None:
        """Ask for this much longer to start, from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """Reset the manager's watchdog, where it has one."""
        if self.watched:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send("STATUS=" + " ".join(text.split()))

    def stopping(self) -> None:
        """Report that the end has begun."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        with suppress(OSError):
            self._socket.sendto(message.encode(errors="replace"), socket.MSG_DONTWAIT, self._address)


START_S = 120.0  # that each sign of life before the first frame gives the start


class Watchdog:
    """Reports signs of life of a run that reads ``source`` to the manager.

    A sign is a frame that was taken, a piece of an answer or, while the run waits, unwanted pictures of a running camera and
    attempts to connect to one that is away. A model call that does not return, or a camera whose threads all hang in a driver,
    gives none: then the manager starts a new process, and only that helps.
    """

    def __init__(self, source: Source, notifier: Notifier) -> None:
        self._source, self._notifier = source, notifier
        self._steps = 0
        self._seen = (0, source.attempts)
        self._waiting = self._ready = False

    def step(self) -> None:
        """Count a frame that was taken, or a piece of an answer."""
        self._steps += 1

    def ready(self) -> None:
        if not self._ready:
            self._ready = True
            self._notifier.ready()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the source in the block."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def tell(self, status: str) -> None:
        """Send the status and any sign of life; about once a second, from any thread."""
        self._notifier.status(status)
        if self._gets_on():
            self._notifier.alive() if self._ready else self._notifier.starting(START_S)

    def stopping(self) -> None:
        self._notifier.stopping()

    def _gets_on(self) -> bool:
        before, self._seen = self._seen, (self._steps, self._source.attempts)
        if self._steps != before[0]:
            return True
        running = self._source.live and self._source.state is State.RUNNING
        return self._waiting and (running or self._source.attempts != before[1])


class SourceStatus:
    """Notices a source that stops giving frames, and one that goes on."""

    def __init__(self, source: Source) -> None:
        self._source, self._since = source, 0.0
        self._reported: tuple[State, str] | None = None

    def news(self) -> str | None:
        """One line for a person, without credentials; None when nothing has changed that matters."""
        state, problem, name = self._source.state, self._source.problem, self._source.name
        if problem is None or state in (State.ENDED, State.FAILED):
            if self._reported is None or state is not State.RUNNING:
                return None
            self._reported = None
            return f"{name}: running again after {time.monotonic() - self._since:.0f} s"
        if (state, problem) == self._reported:
            return None
        self._since = self._since if self._reported else time.monotonic()
        self._reported = (state, problem)
        return f"{name}: {'waiting for it' if state is State.INITIALISING else state.value} ({problem})"
