"""Parse and format times as people write them: ``10m``, ``14:03``, ``14:03:22 (6 min ago)``."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from edgevlm.errors import UserError
from edgevlm.runtime.snapshots.writer import ago
from edgevlm.runtime.time_window import NothingHeld, TimeWindow

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_S = 1e10
NOW_S = 2.0
SLACK_S = 1.0  # added at both ends of a period to delete, because a frame is watched some time after it is taken


def moment(text: str, now: float | None = None) -> float:
    """Convert a time to seconds since 1970: a duration counted back from now (``90s``), a local time or an RFC 3339 timestamp.

    Raises UserError for invalid text, and for a local time that does not exist or occurs twice on that day.
    """
    now, text = time.time() if now is None else now, text.strip()
    if re.fullmatch(r"([0-9]+(\.[0-9]+)?[smhd])+", text):
        parts = re.findall(r"([0-9.]+)([smhd])", text)
        if (seconds := sum(float(number) * UNITS_S[unit] for number, unit in parts)) <= LONGEST_S:
            return now - seconds
    try:
        if re.match(r"[0-9]{1,2}:", text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()
            at = datetime.combine(datetime.fromtimestamp(now), clock)
            return _local(at if at.timestamp() <= now else at - timedelta(days=1), now)
        at = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return _local(at) if at.tzinfo is None else at.timestamp()
    except (ValueError, OverflowError, OSError):
        raise UserError(f"{text[:40]!r} is not a time; give 10m, 1h30m, 14:03 or 2026-11-22T14:03") from None


def _local(at: datetime, latest: float = math.inf) -> float:
    """Convert a local time to seconds since 1970. Raises UserError if ``at`` never occurs, or twice before ``latest``."""
    both = [at.replace(fold=fold).astimezone() for fold in (0, 1)]
    found = [each for each in both if each.replace(tzinfo=None) == at]
    if not found:
        raise UserError(f"{at} does not exist: the clock was set forward past it; give an earlier or later time")
    past = sorted({each.timestamp() for each in found if each.timestamp() <= latest})
    if len(past) > 1:
        raise UserError(f"{at} occurred twice: the clock was set back; give {both[0].isoformat()} or {both[1].isoformat()}")
    return past[0]


def clock_time(seconds: float, now: float | None = None) -> str:
    """Format seconds since 1970 as ``14:03:22 (6 min ago)``, with the date if it is not today."""
    now = time.time() if now is None else now
    at, today = datetime.fromtimestamp(seconds), datetime.fromtimestamp(now)
    day = "" if at.date() == today.date() else f"{at:%b} {at.day} "
    return f"{day}{at:%H:%M:%S}" + (f" ({ago(now - seconds)} ago)" if now - seconds >= NOW_S else "")


def split_window(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``/since 10m until 5m QUESTION`` into the question and its times as typed, if it has any.

    Raises UserError.
    """
    if not re.match(r"/since\b", text):
        return text, {}
    match = re.fullmatch(r"/since\s+(\S+)(?:\s+until\s+(\S+))?\s+(?!until\b)(.+)", text)
    if match is None:
        raise UserError("give a time and a question: /since 10m [until 5m] QUESTION")
    return match[3], {name: part for name, part in (("since", match[1]), ("until", match[2])) if part}


@dataclass(frozen=True, slots=True)
class Span:
    """A period of wall-clock time in seconds since 1970, including both ends; by default, all time."""

    since: float = -math.inf
    until: float = math.inf

    @classmethod
    def typed(cls, since: str | None = None, until: str | None = None) -> Span:
        """Parse the start and the end of a period with :func:`moment`. Empty text means no limit. Raises UserError."""
        now, found = time.time(), dict[str, float]()
        for name, text in (("since", since), ("until", until)):
            if text:
                try:
                    found[name] = moment(text, now)
                except UserError as error:
                    raise UserError(f"{name} {error}") from None
        if len(found) == 2 and found["until"] < found["since"]:
            raise UserError(f"until {until} is before since {since}")
        return cls(**found)

    def __str__(self) -> str:
        """Return text such as `` since 13:03:22 (60 min ago) until 14:00:00``, or "" if both ends are open."""
        ends = (("since", self.since), ("until", self.until))
        return "".join(f" {name} {clock_time(at)}" for name, at in ends if math.isfinite(at))

    @property
    def everything(self) -> bool:
        return self == Span()

    @property
    def open_ended(self) -> tuple[float | None, float | None]:
        """Return the start and the end, with None for no limit."""
        return None if math.isinf(self.since) else self.since, None if math.isinf(self.until) else self.until

    @property
    def with_slack(self) -> Span:
        """Return the period with ``SLACK_S`` added at each end, for deletions."""
        return Span(self.since - SLACK_S, self.until + SLACK_S)

    def of_stream(self, offset: float) -> TimeWindow:
        """Convert the period to stream seconds. ``offset``: the wall-clock time of stream time 0."""
        return TimeWindow(self.since - offset, self.until - offset)

    def seconds(self, offset: float) -> dict[str, Any]:
        """Return the start and the end in stream seconds, as arguments for :meth:`Session.ask`."""
        ends = zip(("since", "until"), self.open_ended, strict=True)
        return {name: at - offset for name, at in ends if at is not None}


def nothing_held(error: NothingHeld, offset: float) -> str:
    """Return the message for a time window without frames in memory. ``offset``: the wall-clock time of stream time 0."""
    window = Span(offset + error.window.since, offset + error.window.until)
    back = "it is empty" if error.oldest_s is None else f"it reaches back to {clock_time(offset + error.oldest_s)}"
    return f"the memory holds nothing{window}; {back}"
