"""Energy over a run: each rail's joules, from counters or as the integral of its watts, less what the machine takes at rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from edgevlm.engines.power import Meter, Reading

INTERVAL_S = 0.1  # between two readings; an INA3221 averages over some tens of milliseconds


@dataclass(slots=True)
class Rail:
    """A rail's joules between its first reading and its last, over ``seconds`` of them; ``gap_s`` could not be read."""

    joules: float = 0.0
    seconds: float = 0.0
    gap_s: float = 0.0
    last: tuple[float, Reading] | None = None

    def add(self, now: float, reading: Reading | None) -> None:
        """Watts are integrated by trapezoids. A counter that is lower than before has begun again."""
        if self.last is not None:
            before, earlier = self.last
            if reading is None:
                self.gap_s += now - before
                self.last = (now, Reading())
                return
            more = gained(earlier, reading, now - before)
            if more is None:
                self.gap_s += now - before
            else:
                self.joules, self.seconds = self.joules + more, self.seconds + now - before
        self.last = (now, reading if reading is not None else Reading())


def gained(before: Reading, after: Reading, seconds: float) -> float | None:
    """Joules between two readings ``seconds`` apart; None where one of them says nothing."""
    if before.joules is not None and after.joules is not None:
        if after.joules >= before.joules:
            return after.joules - before.joules
        return None if after.wraps is None else after.joules + after.wraps - before.joules
    if before.watts is not None and after.watts is not None:
        return seconds * (before.watts + after.watts) / 2
    return None


class Energy:
    """What a meter measures inside the block, read each ``interval_s`` in a thread and at both ends.

    ``idle_w``: watts at rest, taken off by :meth:`net`. clock: seconds, for tests.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        idle_w: float | None = None,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter, self.idle_w = meter, idle_w
        self.rails = {name: Rail() for name in meter.rails}
        self._interval, self._clock, self._over = interval_s, clock, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="energy", daemon=True)

    def __enter__(self) -> Energy:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self.sample()

    def sample(self) -> None:
        """Read every rail once."""
        found, now = self.meter.read(), self._clock()
        for name, rail in self.rails.items():
            rail.add(now, found.get(name))

    @property
    def joules(self) -> float | None:
        """Of the rails that are summed; None if one could not be read for a time, for that would be a guess."""
        summed = [self.rails[name] for name in self.meter.summed]
        return None if not summed or any(rail.gap_s or not rail.seconds for rail in summed) else sum(r.joules for r in summed)

    @property
    def seconds(self) -> float:
        """The longest that a rail was read."""
        return max((rail.seconds for rail in self.rails.values()), default=0.0)

    @property
    def watts(self) -> float | None:
        """The mean."""
        return None if self.joules is None else self.joules / self.seconds

    def net(self) -> float | None:
        """Joules less what the machine takes at rest in the same time; None without either."""
        return None if self.joules is None or self.idle_w is None else self.joules - self.idle_w * self.seconds

    def figures(self) -> dict[str, Any]:
        """For a line of JSON: None is not measured."""
        rails = {name: {"joules": round(rail.joules, 3), "gap_s": round(rail.gap_s, 3)} for name, rail in self.rails.items()}
        return {
            "meter": self.meter.name,
            "joules": _rounded(self.joules),
            "watts": _rounded(self.watts),
            "idle_watts": _rounded(self.idle_w),
            "net_joules": _rounded(self.net()),
            "summed": list(self.meter.summed),
            "rails": rails,
        }

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            self.sample()


def idle_watts(meter: Meter, seconds: float) -> float | None:
    """The mean over ``seconds`` in which nothing is asked of the machine; None if it was not measured throughout."""
    with Energy(meter) as energy:
        time.sleep(seconds)
    return energy.watts


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)
