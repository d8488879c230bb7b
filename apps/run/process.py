"""Handle signals and closed streams, and report to the service manager and the user."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import psutil

from edgevlm.apps.sources import Source, State
from edgevlm.progress import silence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Shutdown:
    """Calls ``stop`` at the first signal, and interrupts a :meth:`waiting` block.

    A second signal raises KeyboardInterrupt. A closing terminal causes both SIGHUP and the signal from :meth:`ask`, so neither
    counts as a second signal. An ignored SIGHUP stays ignored, as under nohup. Works only in the main thread.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.asked = self.forced = self._waiting = self._own = False
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Shutdown:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal interrupt the block with KeyboardInterrupt. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waiting = True
        try:
            if self.asked and self._before:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def ask(self) -> None:
        """End the run as SIGTERM would. Any thread may call this method."""
        if not self.asked and signal.SIGTERM in self._before:
            self._own = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self.asked:
            self.asked = True
            self._stop()

    def _signalled(self, number: int, _: object) -> None:
        gone = number == signal.SIGHUP or (self._own and number == signal.SIGTERM)
        self._own &= number != signal.SIGTERM
        if not self.asked:
            self.asked = True
            self._stop()
            if self._waiting:
                raise KeyboardInterrupt
        elif not gone:
            self.forced = True
            raise KeyboardInterrupt


def is_gone(stream: TextIO) -> bool:
    """Return whether a stream has lost its reader: the pipe's other end is closed, or the terminal is gone."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def silence_if_gone() -> bool:
    """If stdout has lost its reader, redirect stdout to the null device and return True."""
    if gone := is_gone(sys.stdout):
        silence(sys.stdout)
    return gone


class Notifier:
    """Sends sd_notify(3) messages to the service manager's socket, which ``NOTIFY_SOCKET`` names.

    Does nothing without NOTIFY_SOCKET, and never blocks. ALIVE is sent only if the manager expects it from this process
    (``WATCHDOG_USEC``, ``WATCHDOG_PID``).
    """

    READY, ALIVE, STOPPING = "READY=1", "WATCHDOG=1", "STOPPING=1"
    STARTING = "EXTEND_TIMEOUT_USEC=120000000"  # allow the start to take another two minutes

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._is_watched = mine and environment.get("WATCHDOG_USEC", "").isdigit()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None

    def send(self, message: str) -> None:
        """Send READY, STARTING, ALIVE, STOPPING, or a ``STATUS=`` line for ``systemctl status``."""
        if self._socket is not None and (self._is_watched or message != self.ALIVE):
            with suppress(OSError):
                self._socket.sendto(" ".join(message.split()).encode(errors="replace"), socket.MSG_DONTWAIT, self._address)


def source_news(source: Source) -> Iterator[str | None]:
    """Yield a line when the source stops or runs again, and None otherwise. Lines contain no credentials."""
    reported, since = None, 0.0
    while True:
        state, problem, line = source.state, source.problem, None
        if problem is None or state in (State.ENDED, State.FAILED):
            if reported is not None and state is State.RUNNING:
                reported, line = None, f"{source.name}: running again after {time.monotonic() - since:.0f} s"
        elif (state, problem) != reported:
            since = since if reported else time.monotonic()
            reported = state, problem
            line = f"{source.name}: {'waiting for the camera' if state is State.INITIALISING else state.value} ({problem})"
        yield line


class ResidentMemory:
    """Reads this process's resident memory in bytes. If a reading fails, returns the previous value."""

    def __init__(self) -> None:
        self._process, self._nbytes = psutil.Process(), 0

    def nbytes(self) -> int:
        with suppress(OSError, psutil.Error):
            self._nbytes = self._process.memory_info().rss
        return self._nbytes
