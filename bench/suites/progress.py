"""Progress on stderr: a bar on a terminal, else a line now and then with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY_S = 10.0  # between two lines


class Lines:
    """A line when a stage begins and ends, and every ten seconds. clock: seconds that never run backwards."""

    def __init__(self, write: Callable[[str], object] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._clock = clock
        self._what, self._first, self._began, self._said = "", 0, 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        begins = what != self._what
        if begins:
            self._what, self._first, self._began = what, done, now
        if begins or done >= total or now - self._said >= EVERY_S:
            self._said = now
            left = time_left(done - self._first, total - done, now - self._began)
            self._write(f"{what}: {done} of {total}{left}")


def time_left(done: int, left: int, seconds: float) -> str:
    """How long ``left`` will take when ``done`` took ``seconds``; nothing before the first or after the last."""
    if not done or not left:
        return ""
    minutes, rest = divmod(round(seconds / done * left), 60)
    hours, minutes = divmod(minutes, 60)
    return f", {hours} h {minutes} min left" if hours else f", {minutes} min {rest} s left" if minutes else f", {rest} s left"
