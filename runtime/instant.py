"""Measure durations that do not change when the wall clock is set."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple


@cache
def boot_id() -> str:
    """Return the id of the current boot, or an empty string if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Instant(NamedTuple):
    """A moment. ``boot``: the id of the machine's boot at that moment. ``boot_s``: seconds since boot, including sleep.
    ``wall``: seconds since 1970.
    """

    boot: str
    boot_s: float
    wall: float

    @classmethod
    def now(cls) -> Instant:
        return cls(boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def since(self, then: Instant, most: float = math.inf) -> float:
        """Return the seconds from an earlier instant to this one, 0 or more.

        If the machine was restarted in between, returns the difference of the wall clocks, but at most ``most``.
        """
        if self.boot and self.boot == then.boot:
            return max(0.0, self.boot_s - then.boot_s)
        return min(max(0.0, self.wall - then.wall), most)
