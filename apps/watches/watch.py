"""Define a watch, which is a standing question to a camera, and decide when it opens and closes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from edgevlm.apps.names import Id, Name, NamedId, id_of, slug

GAP_S = 30.0  # open_after and close_after restart if no probability comes for `every` + GAP_S seconds
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MAX_SECONDS = 7 * 86_400

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
DeviceClass = Literal[
    "battery", "battery_charging", "carbon_monoxide", "cold", "connectivity", "door", "garage_door", "gas", "heat", "light",
    "lock", "moisture", "motion", "moving", "occupancy", "opening", "plug", "power", "presence", "problem", "running", "safety",
    "smoke", "sound", "tamper", "update", "vibration", "window",
]  # fmt: skip


class WatchSettings(BaseModel):
    """A watch's question, and the rule that opens and closes the watch.

    ``choices``: the possible answers. ``answer``: the answers that open the watch, by default the first choice. ``every``: ask
    again after this many seconds, or at each frame if ``every`` is 0. ``changed``: ask only after the picture has changed.

    The watch opens once the probability of ``answer`` has been above ``open_above`` for ``open_after`` seconds. The watch
    closes once the probability has been below ``close_below`` for ``close_after`` seconds. If ``open_after`` or ``close_after``
    is above 0, at least two answers are needed. After closing, the watch stays closed for ``cooldown`` seconds.

    ``schedule``: the hours in which the question is asked, in local time. ``sinks``: the sinks that receive the events, by
    default all. ``on``: which events the sinks receive.
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
    device_class: DeviceClass | None = None
    sinks: Annotated[list[Id], Field(max_length=64)] = []

    @field_validator("choices", "answer", "close_below", "schedule")
    @classmethod
    def _fit(cls, value: Any, info: ValidationInfo) -> Any:
        name, choices, above = info.field_name, info.data.get("choices", []), info.data.get("open_above", 1.0)
        if name == "choices" and len(set(value)) < len(value):
            raise ValueError("duplicate choice; remove it")
        if name == "answer" and choices and not set(value) < set(choices):
            raise ValueError(f"must be some of the choices, not all: {', '.join(choices)}")
        if name == "close_below" and value > above:
            raise ValueError(f"{value:g} is above open_above ({above:g}); change one of them")
        for each in value if name == "schedule" else ():
            covers(each, datetime.now())
        return value


class Watch(WatchSettings):
    """A question that is asked repeatedly.

    ``name``: an id, or text in any script that is turned into an id. The default is the question. ``label``: the displayed
    name. ``cameras``: the streams on which the watch is asked, by default all.
    """

    name: NamedId = ""
    label: Name | None = None
    cameras: Annotated[list[NamedId], Field(max_length=256)] = []

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name, question = values.get("name"), values.get("question")
        if name is None and isinstance(question, str):
            words = slug(question)[:64].rstrip("-") or "watch"
            return {**values, "name": words if question.isascii() else id_of(question)}
        if isinstance(name, str) and id_of(name) != name:
            return {"label": name, **values}
        return values

    @property
    def answers(self) -> list[str]:
        """Return the choices that open the watch."""
        return self.answer or self.choices[:1]

    @property
    def in_words(self) -> str:
        """Return the question followed by the answers that open the watch, unless "yes" is the only such answer."""
        return self.question if self.answers == ["yes"] else f"{self.question} {' or '.join(self.answers)}"

    def asks(self, now: datetime) -> bool:
        return not self.schedule or any(covers(each, now) for each in self.schedule)


def covers(hours: str, now: datetime) -> bool:
    """Return whether a local time is within hours such as ``mon-fri 08:00-18:00``. ``22:00-06:00`` ends the next day.

    Raises ValueError.
    """
    match = re.fullmatch(r"(?:([a-z]{3}(?:[-,][a-z]{3})*) ?)?(?:(\d\d):(\d\d)-(\d\d):(\d\d))?", hours.strip().lower())
    if not match or not match[0]:
        raise ValueError(f"{hours!r}: invalid hours; use a form like 'mon-fri 08:00-18:00', 'sat,sun' or '22:00-06:00'")
    days = set[int]()
    for part in (match[1] or "mon-sun").split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last or first) not in DAYS:
            raise ValueError(f"{hours!r}: unknown day; use {', '.join(DAYS)}")
        begin, count = DAYS.index(first), (DAYS.index(last or first) - DAYS.index(first)) % 7
        days |= {(begin + day) % 7 for day in range(count + 1)}
    from_hour, from_minute, to_hour, to_minute = (int(each) for each in match.groups()[1:]) if match[2] else (0, 0, 24, 0)
    start, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
    if max(from_minute, to_minute) > 59 or max(start, end) > 24 * 60:
        raise ValueError(f"{hours!r}: times must be between 00:00 and 24:00")
    minute, today = 60 * now.hour + now.minute, now.weekday()
    if start < end:
        return today in days and start <= minute < end
    return (today in days and minute >= start) or ((today - 1) % 7 in days and minute < end)


@dataclass(slots=True)
class WatchState:
    """Tracks whether a watch is open on a camera.

    ``since``: the stream time at which the watch last opened or closed. ``probability``: the newest probability of the answer.
    ``asked``: the stream time of the question that gave this probability.
    """

    watch: Watch
    is_open: bool = False
    since: float | None = None
    probability: float | None = None
    asked: float | None = None
    _beyond: float | None = None  # stream time since which the probability has been past the threshold

    @property
    def answer(self) -> Literal["yes", "no", "not sure"] | None:
        if self.probability is None:
            return None
        above, below = self.probability > self.watch.open_above, self.probability < self.watch.close_below
        return "yes" if above else "no" if below else "not sure"

    @property
    def is_changing(self) -> bool:
        """Return whether the watch is about to open or close, which it does unless the answer changes first."""
        return self._beyond is not None

    def observe(self, time: float, probability: float) -> bool:
        """Add a probability, measured at a stream time in seconds. Return whether the watch opened or closed.

        The seconds of ``open_after`` and ``close_after`` are counted from 0 again if no probability came for too long, or if
        stream time goes back.
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
        """Close the watch when its schedule ends, or when it is paused or removed. Return whether the watch was open."""
        was_open, self.probability, self.asked, self._beyond = self.is_open, None, None, None
        if was_open:
            self._change(time)
        return was_open

    def _change(self, time: float) -> None:
        self.is_open, self.since, self._beyond = not self.is_open, time, None
