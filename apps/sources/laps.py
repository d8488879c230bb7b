"""How long each stage of a frame's way took."""

from __future__ import annotations

import time


class Laps:
    """A watch started with a frame. ``ms``: milliseconds by stage; ``born_s``: when the picture was there, monotonic clock."""

    __slots__ = ("_last", "born_s", "ms")

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.born_s = self._last = time.monotonic()

    def born(self) -> None:
        """The picture is there: what comes after is its latency."""
        self.lap("capture")
        self.born_s = self._last

    def resume(self) -> None:
        """A pause is over, which was no part of the way."""
        now = time.monotonic()
        self.born_s += now - self._last
        self._last = now

    def lap(self, stage: str) -> None:
        """A stage is over; what follows counts for the next."""
        now = time.monotonic()
        self.ms[stage] = 1e3 * (now - self._last)
        self._last = now
