"""Typed access to a record of somebody else's file: what is not as it should be raises Malformed, with the field's name."""

from __future__ import annotations

import math
import re
from typing import Any

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST = 20_000  # characters of a text; a prompt longer than a model's positions is refused later, by its tokens
LATEST = 1e7  # seconds: a third of a year

JSON_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


class Malformed(ValueError):
    """Why a record cannot be used, in a few words."""


class Fields:
    """A JSON object. Every method raises Malformed for a field that is missing, or is not what its name says."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise Malformed(f"is {json_name(value)}, not an object")
        self.values = value

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def value(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise Malformed(f"{name} is missing")
        return self.values[name]

    def text(self, name: str) -> str:
        """A text of characters, not empty."""
        return _text(self.value(name), name)

    def texts(self, name: str, least: int = 1) -> tuple[str, ...]:
        """A list of ``least`` texts or more; numbers among them are taken as they are written."""
        return tuple(_text_or_number(part, f"{name}[{index}]") for index, part in enumerate(self.list(name, least)))

    def list(self, name: str, least: int = 0) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise Malformed(f"{name} is {json_name(value)}, not a list")
        if len(value) < least:
            raise Malformed(f"{name} has {len(value)} entries, not {least} or more")
        return value

    def integer(self, name: str) -> int:
        """An integer from 0 up, also as text."""
        value = self.value(name)
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip()):
            return int(value)
        if not _is_number(value) or not math.isfinite(value) or value != int(value) or value < 0:
            raise Malformed(f"{name} is {shown(value)}, not an integer")
        return int(value)

    def seconds(self, name: str) -> float:
        """Seconds from 0 up: a number, a number as text, or a clock's ``HH:MM:SS`` or ``MM:SS``."""
        return seconds_of(self.value(name), name)

    def clip(self, start: str, end: str) -> tuple[float, float]:
        """From when to when, seconds; not empty."""
        return clip_of(self.seconds(start), self.seconds(end))

    def options(self, name: str) -> tuple[str, ...]:
        """Two options or more of a multiple choice, without ``A.`` or ``(A)`` before them."""
        options = self.texts(name, least=2)
        if len(options) > len(LETTERS):
            raise Malformed(f"{name} has {len(options)} entries, more than there are letters")
        lettered = zip(LETTERS, options, strict=False)
        return tuple(re.sub(rf"^\(?{letter}[.):]\s*", "", option) or option for letter, option in lettered)

    def letter(self, name: str, options: tuple[str, ...]) -> str:
        """The right letter, given as a letter, ``B.`` and ``(B)`` too."""
        given = self.text(name).strip("().: ").upper()
        if len(given) != 1 or given not in LETTERS[: len(options)]:
            raise Malformed(f"{name} is {given[:20]!a}, not a letter of its {len(options)} options")
        return given

    def letter_at(self, name: str, options: tuple[str, ...]) -> str:
        """The right letter, given as an index from 0."""
        index = self.integer(name)
        if index >= len(options):
            raise Malformed(f"{name} is {index}, not an index of its {len(options)} options")
        return LETTERS[index]


def clip_of(start: float, end: float) -> tuple[float, float]:
    if not start < end:
        raise Malformed(f"ends at {end:g} s and begins at {start:g} s")
    return start, end


def seconds_of(value: Any, name: str) -> float:
    """Seconds as a number or a clock's text. Raises Malformed if it is invalid, NaN, negative, or a third of a year."""
    seconds = math.nan
    if _is_number(value):
        seconds = float(value)
    elif isinstance(value, str) and re.fullmatch(r"\d{1,7}(:\d{1,2}){0,2}(\.\d+)?", value.strip()):
        seconds = sum(float(part) * 60**place for place, part in enumerate(reversed(value.strip().split(":"))))
    if not 0 <= seconds <= LATEST:
        raise Malformed(f"{name} is {shown(value)}, not a time in seconds")
    return seconds


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{name} is {json_name(value)}, not text")
    if not value.strip():
        raise Malformed(f"{name} is empty")
    if len(value) > LONGEST:
        raise Malformed(f"{name} has {len(value)} characters")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise Malformed(f"{name} holds what is no character")
    return value.strip()


def _text_or_number(value: Any, name: str) -> str:
    return _text(f"{value:g}" if _is_number(value) else value, name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_name(value: Any) -> str:
    """What JSON calls it."""
    return "null" if value is None else JSON_NAMES.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value of somebody else's file in a line of ours: short, and nothing that a terminal obeys."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return short if short.isprintable() else ascii(short)[1:-1]


def listed(options: tuple[str, ...]) -> str:
    """The options, a line each."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))
