"""What a service manager is told, where one asks for it: sd_notify(3), one datagram a message."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


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
