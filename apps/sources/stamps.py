"""The times that sources give their pictures: what is wrong with them is mended."""

from __future__ import annotations

TOLERANCE_S = 2.0  # how far a camera's clock may drift or a picture be late before the clock is no longer believed
LEAST_S = 1e-3  # between two mended times
JUMP_S = 60.0  # between two pictures of a recording: more is not believed, either way


class StampMender:
    """Makes the stamps of one camera strictly increasing and keeps them near the times the pictures arrived at.

    The first mended time is the first arrival. After it, with stamps ``s``, arrivals ``a`` and mended times ``m``, a step of
    the camera's clock is believed where it goes forwards and leads to a time near the arrival::

        m[n] = m[n-1] + (s[n] - s[n-1])           if s[n] > s[n-1] and |m[n-1] + s[n] - s[n-1] - a[n]| <= TOLERANCE_S
             = max(a[n], m[n-1] + LEAST_S)        otherwise: the stamp is missing, repeated, or has jumped; ``mended`` counts it

    So a regular clock passes unchanged but for where it begins; a clock that jumps (set by NTP, wrapped, restarted with the
    camera) goes on from the arrival, by its own steps again.
    """

    def __init__(self) -> None:
        self.mended = 0  # stamps that were not believed
        self._stamp: float | None = None
        self._time: float | None = None

    def __call__(self, stamp_s: float | None, arrival_s: float) -> float:
        """The mended time of a picture, seconds on the clock of ``arrival_s``, which must not run backwards."""
        before, self._stamp = self._stamp, stamp_s
        if self._time is None:
            self._time = arrival_s
            return self._time
        step = stamp_s - before if stamp_s is not None and before is not None else 0.0
        if step > 0 and abs(self._time + step - arrival_s) <= TOLERANCE_S:
            self._time = max(self._time + step, self._time + LEAST_S)
        else:
            self.mended += stamp_s is not None
            self._time = max(arrival_s, self._time + LEAST_S)
        return self._time

    def restart(self) -> None:
        """Another connection has another origin: its first stamp says nothing about the time since the last one."""
        self._stamp = None


class RecordedClock:
    """Makes the stamps of a recording strictly increasing; there is no arrival to hold them against.

    With stamps ``s``, an origin ``o`` (0 at first) and the declared time of one picture ``p``::

        m[n] = max(s[n] + o, m[n-1] + LEAST_S)    a repeat, or pictures in the wrong order: the later stamps are right again
        o    = m[n-1] + p - s[n]                  first, where |s[n] + o - m[n-1]| > JUMP_S: the clock was set, and goes on

    A picture without a stamp is ``p`` after the one before.
    """

    def __init__(self, period_s: float) -> None:
        self._period = period_s
        self._origin = 0.0
        self.time_s: float | None = None  # of the newest picture

    def __call__(self, stamp_s: float | None) -> float:
        """The mended time of the next picture, seconds."""
        before = self.time_s
        if before is None:
            self.time_s = max(0.0, stamp_s or 0.0)
            self._origin = self.time_s - (stamp_s or 0.0)
            return self.time_s
        if stamp_s is None or abs(stamp_s + self._origin - before) > JUMP_S:
            self.time_s = before + self._period
            if stamp_s is not None:
                self._origin = self.time_s - stamp_s
        else:
            self.time_s = max(stamp_s + self._origin, before + LEAST_S)
        return self.time_s
