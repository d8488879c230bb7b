"""A watch, a standing question to a camera: its settings, and when it opens and closes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

GAP_S = 30.0  # without a probability, beyond `every`, after which a hold begins anew
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
MAX_SECONDS = 7 * 86_400

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
WatchName = Annotated[str, StringConstraints(pattern=NAME)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class WatchSettings(BaseModel):
    """What a watch asks and when it opens. choices: the answers.

    answer: those of them that open it, the first unless given. every: seconds from one question to the next; each frame unless
    given. changed: ask only when the picture has changed since.

    open_above, close_below: probabilities of the answer; what lies between is "not sure", and changes nothing. open_after,
    close_after: seconds that it must stay beyond them; with more than 0, for two answers at least. cooldown: seconds after it
    closed in which it does not open. schedule: ``mon-fri 08:00-18:00``, ``sat,sun`` or ``22:00-06:00``, of local time; always
    unless given. on: events to send; sinks: to these, to all unless given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    question: Text
    choices: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=2, max_length=64)] = [
        "yes",
        "no",
    ]
    answer: Annotated[list[str], Field(max_length=63)] = []
    every: Seconds = 0.0
    changed: bool = False
    open_above: Probability = 0.6
    close_below: Annotated[Probability, Field(validate_default=True)] = 0.4
    open_after: Seconds = 0.1
    close_after: Seconds = 0.1
    cooldown: Seconds = 0.0
    schedule: Annotated[list[str], Field(max_length=64)] = []
    on: Literal["open", "close", "both"] = "both"
    sinks: Annotated[list[WatchName], Field(max_length=64)] = []

    @field_validator("choices")
    @classmethod
    def _choices(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("the same choice stands twice")
        return value

    @field_validator("answer")
    @classmethod
    def _answer(cls, value: list[str], info: Any) -> list[str]:
        choices = info.data.get("choices", [])
        if choices and not set(value) < set(choices):
            raise ValueError(f"give some of the choices, not all: {', '.join(choices)}")
        return value

    @field_validator("close_below")
    @classmethod
    def _close_below(cls, value: float, info: Any) -> float:
        if value > info.data.get("open_above", 1.0):
            raise ValueError(f"{value:g} is above open_above, {info.data['open_above']:g}; set it too")
        return value

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: list[str]) -> list[str]:
        for each in value:
            Hours.parse(each)
        return value


class Watch(WatchSettings):
    """A question, asked again and again. It is open while the answer is yes.

    name: the question's words unless given. cameras: names of streams; all of them unless given.
    """

    name: WatchName = ""
    cameras: Annotated[list[WatchName], Field(max_length=256)] = []

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, dict) and "name" not in values and isinstance(values.get("question"), str):
            return {**values, "name": slug(values["question"])}
        return values

    @property
    def answers(self) -> list[str]:
        """The choices that open it."""
        return self.answer or self.choices[:1]

    @property
    def in_words(self) -> str:
        """The question, and what opens it where that is not yes."""
        return self.question if self.answers == ["yes"] else f"{self.question} {' or '.join(self.answers)}"

    def asks(self, now: datetime) -> bool:
        """Whether its schedule covers this local time."""
        return not self.schedule or any(Hours.parse(each).cover(now) for each in self.schedule)


def slug(text: str) -> str:
    """A name made of a text's words: ``is-there-a-red-square``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:64].rstrip("-") or "watch"


@dataclass(frozen=True, slots=True)
class Hours:
    """Days of the week, 0 Monday, and minutes of the day from which to which; past midnight where the end is not later."""

    days: frozenset[int]
    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Raises ValueError if it is invalid."""
        match = re.fullmatch(r"(?:([a-z]{3}(?:[-,][a-z]{3})*) ?)?(?:(\d\d):(\d\d)-(\d\d):(\d\d))?", text.strip().lower())
        if not match or not match[0]:
            raise ValueError(f"{text!r}: write it like 'mon-fri 08:00-18:00', 'sat,sun' or '22:00-06:00'")
        days: set[int] = set()
        for part in (match[1] or "mon-sun").split(","):
            first, _, last = part.partition("-")
            if first not in DAYS or (last or first) not in DAYS:
                raise ValueError(f"{text!r}: the days are {', '.join(DAYS)}")
            begin, count = DAYS.index(first), (DAYS.index(last or first) - DAYS.index(first)) % 7
            days |= {(begin + day) % 7 for day in range(count + 1)}
        if match[2] is None:
            return cls(frozenset(days), 0, 24 * 60)
        from_hour, from_minute, to_hour, to_minute = (int(match[group]) for group in range(2, 6))
        if (
            max(from_hour, to_hour) > 24
            or max(from_minute, to_minute) > 59
            or max(60 * from_hour + from_minute, 60 * to_hour + to_minute) > 24 * 60
        ):
            raise ValueError(f"{text!r}: a time of day is from 00:00 to 24:00")
        return cls(frozenset(days), 60 * from_hour + from_minute, 60 * to_hour + to_minute)

    def cover(self, now: datetime) -> bool:
        """Whether they cover this local time."""
        minute, today = 60 * now.hour + now.minute, now.weekday()
        if self.start < self.end:
            return today in self.days and self.start <= minute < self.end
        yesterday = (now - timedelta(days=1)).weekday()
        return (today in self.days and minute >= self.start) or (yesterday in self.days and minute < self.end)


@dataclass(slots=True)
class WatchState:
    """Whether a watch is open on a camera, by what it was told of its answer's probability.

    is_open, since: since when, in seconds of the stream; None before it first opened. probability, asked: the newest, and when.
    """

    watch: Watch
    is_open: bool = False
    since: float | None = None
    probability: float | None = None
    asked: float | None = None
    _beyond: float | None = None  # since when the probability asks for a change

    @property
    def answer(self) -> Literal["yes", "no", "not sure"] | None:
        """What the newest probability says; None before there is one."""
        if self.probability is None:
            return None
        above, below = self.probability > self.watch.open_above, self.probability < self.watch.close_below
        return "yes" if above else "no" if below else "not sure"

    @property
    def is_changing(self) -> bool:
        """Whether the newest answer asks for a change that is held back for now."""
        return self._beyond is not None

    def observe(self, time: float, probability: float) -> bool:
        """Take a probability of this time, seconds of the stream; whether it opened or closed.

        A hold begins anew after a gap, and where time goes back.
        """
        watch = self.watch
        if self.asked is None or not self.asked <= time <= self.asked + watch.every + GAP_S:
            self._beyond = None
        self.probability, self.asked = probability, time
        if self.answer != ("no" if self.is_open else "yes"):
            self._beyond = None
            return False
        self._beyond = time if self._beyond is None else self._beyond
        cooling = not self.is_open and self.since is not None and self.since <= time < self.since + watch.cooldown
        if cooling or time - self._beyond < (watch.close_after if self.is_open else watch.open_after):
            return False
        self._change(time)
        return True

    def end(self, time: float) -> bool:
        """Its schedule ends, or it is paused or removed: whether it was open, and closes."""
        was_open, self.probability, self.asked, self._beyond = self.is_open, None, None, None
        if was_open:
            self._change(time)
        return was_open

    def _change(self, time: float) -> None:
        self.is_open, self.since, self._beyond = not self.is_open, time, None
