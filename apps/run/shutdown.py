"""The end of a run by signals, or by a reader or terminal that goes away; the frame in progress is finished."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Shutdown:
    """While entered, the first signal calls ``stop`` and interrupts only what is in :meth:`waiting`.

    A second one raises KeyboardInterrupt wherever the main thread is; but not SIGHUP, nor the signal of :meth:`ask`, which both
    come when a terminal goes away. An ignored SIGHUP stays so, as under nohup. Does nothing in other threads than the main one.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.asked = self.forced = False
        self._stop = stop
        self._waiting = self._entered = self._own = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Shutdown:
        self._entered = threading.current_thread() is threading.main_thread()
        if self._entered:
            for number in SIGNALS:
                if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal raise KeyboardInterrupt in the block, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waiting = True
        try:
            if self.asked and self._entered:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def ask(self) -> None:
        """End as if a signal had come; from any thread."""
        if not self.asked and signal.SIGTERM in self._before:
            self._own = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self.asked:
            self.asked = True
            self._stop()

    def _signalled(self, number: int, _: object) -> None:
        gone = number == signal.SIGHUP or (self._own and number == signal.SIGTERM)
        if number == signal.SIGTERM:
            self._own = False
        if self.asked and gone:
            return
        if self.asked:
            self.forced = True
            raise KeyboardInterrupt
        self.asked = True
        self._stop()
        if self._waiting:
            raise KeyboardInterrupt


def is_gone(stream: TextIO) -> bool:
    """Whether a stream's reader has gone: the pipe's other end is closed, or the terminal went away."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def silence_what_is_gone() -> bool:
    """Send stdout and stderr to the null device where their readers have gone; return whether one has."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if is_gone(stream)]
    for stream in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(gone)
