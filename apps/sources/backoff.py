"""How long to wait before a camera is tried again."""

from __future__ import annotations

import random


class Backoff:
    """Pauses of ``first_s * 2^n``, at most ``longest_s``, each shortened by up to half at random.

    Cameras that died together (a switch, a power cut) are so not all tried in the same moment.
    """

    def __init__(self, first_s: float, longest_s: float, seed: int | None = None) -> None:
        self._first, self._longest = first_s, longest_s
        self._random = random.Random(seed)
        self.reset()

    def reset(self) -> None:
        """It worked: the next pause is a short one again."""
        self._next = min(self._first, self._longest)

    def pause(self) -> float:
        """Seconds to wait now."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause * self._random.uniform(0.5, 1)
