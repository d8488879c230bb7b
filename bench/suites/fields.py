"""Typed access to a record of somebody else's file: what is not as it should be raises Malformed, with the field's name."""

from __future__ import annotations

import math
import re
from typing import Any

LONGEST = 20_000  # characters of a text; a prompt longer than a model's positions is refused later, by its tokens
LATEST = 1e7  # seconds: a third of a year


class Malformed(ValueError):
    """Why a record cannot be used, in a few words."""


class Fields:
    """A JSON object. Every method raises Malformed for a field that is missing, or is not what its name says."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise Malformed(f"is {kind_of(value)}, not an object")
        self.values = value

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def value(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise Malformed(f"{name} is missing")
        return self.values[name]

    def text(self, name: str) -> str:
        """A text of characters, not empty."""
        return text_of(self.value(name), name)

    def texts(self, name: str, least: int = 1) -> tuple[str, ...]:
        """A list of ``least`` texts or more; numbers among them are taken as they are written."""
        return tuple(
            text_of(f"{part:g}" if _is_number(part) else part, f"{name}[{index}]")
            for index, part in enumerate(self.list(name, least))
        )

    def list(self, name: str, least: int = 0) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise Malformed(f"{name} is {kind_of(value)}, not a list")
        if len(value) < least:
            raise Malformed(f"{name} has {len(value)} entries, not {least} or more")
        return value

    def whole(self, name: str) -> int:
        """A whole number from 0 up, also as text."""
        value = self.value(name)
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip()):
            return int(value)
        if not _is_number(value) or not math.isfinite(value) or value != int(value) or value < 0:
            raise Malformed(f"{name} is {shown(value)}, not a whole number")
        return int(value)

    def seconds(self, name: str) -> float:
        """Seconds from 0 up: a number, a number as text, or a clock's ``HH:MM:SS`` or ``MM:SS``."""
        return seconds_of(self.value(name), name)

    def clip(self, start: str, end: str) -> tuple[float, float]:
        """From when to when, seconds; not empty."""
        return clip_of(self.seconds(start), self.seconds(end))


def clip_of(start: float, end: float) -> tuple[float, float]:
    if not start < end:
        raise Malformed(f"ends at {end:g} s and begins at {start:g} s")
    return start, end


def seconds_of(value: Any, name: str) -> float:
    """Seconds as a number or a clock's text. Raises Malformed for what is none, NaN, negative, or a third of a year."""
    seconds = math.nan
    if _is_number(value):
        seconds = float(value)
    elif isinstance(value, str) and re.fullmatch(r"\d{1,7}(\.\d+)?(:\d{1,2}){0,2}(\.\d+)?", value.strip()):
        parts = value.strip().split(":")
        try:
            seconds = sum(float(part) * 60**place for place, part in enumerate(reversed(parts)))
        except ValueError:
            seconds = math.nan
    if not 0 <= seconds <= LATEST:
        raise Malformed(f"{name} is {shown(value)}, not a time in seconds")
    return seconds


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{name} is {kind_of(value)}, not text")
    if not value.strip():
        raise Malformed(f"{name} is empty")
    if len(value) > LONGEST:
        raise Malformed(f"{name} has {len(value)} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{name} holds what is no character") from None
    return value.strip()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value of somebody else's file in a line of ours: short, and nothing that a terminal obeys."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return short if short.isprintable() else ascii(short)[1:-1]
