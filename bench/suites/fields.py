"""Values of somebody else's records, as pydantic types: an invalid one leaves its record out."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LATEST = 1e7  # seconds: a third of a year


class Malformed(ValueError):
    """Why a record cannot be used, in a few words."""


class RecordModel(BaseModel):
    """A record of a file; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def seconds_of(value: Any) -> float:
    """Seconds as a number, a number as text, or a clock's ``HH:MM:SS`` or ``MM:SS``. Raises Malformed."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= LATEST else math.nan
    elif isinstance(value, str) and re.fullmatch(r"\d{1,7}(:\d{1,2}){0,2}(\.\d+)?", value.strip()):
        seconds = sum(float(part) * 60**place for place, part in enumerate(reversed(value.strip().split(":"))))
    if not 0 <= seconds <= LATEST:
        raise Malformed("is not a time in seconds")
    return seconds


def clip_of(ends: Any) -> tuple[float, float]:
    """From when to when, seconds; not empty. Raises Malformed."""
    if not isinstance(ends, list | tuple) or len(ends) < 2:
        raise Malformed("is not a start and an end")
    start, end = seconds_of(ends[0]), seconds_of(ends[1])
    if not start < end:
        raise Malformed(f"ends at {end:g} s and begins at {start:g} s")
    return start, end


def letter_of(given: str, options: tuple[str, ...]) -> str:
    """The right letter, given as a letter, ``B.`` and ``(B)`` too. Raises Malformed."""
    letter = given.strip("().: ").upper()
    if len(letter) != 1 or letter not in LETTERS[: len(options)]:
        raise Malformed(f"answer is not a letter of its {len(options)} options")
    return letter


def _options_of(value: Any) -> tuple[str, ...]:
    """The options of a multiple choice, without ``A.`` or ``(A)`` before them; numbers are taken as they are written."""
    if not isinstance(value, list):
        raise Malformed("is not a list")
    texts = [f"{each:g}" if isinstance(each, int | float) and abs(each) < LATEST else each for each in value]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise Malformed("has an entry that is not text")
    if len(texts) > len(LETTERS):
        raise Malformed("has more entries than there are letters")
    lettered = zip(LETTERS, texts, strict=False)
    return tuple(re.sub(rf"^\(?{letter}[.):]\s*", "", text.strip()) or text for letter, text in lettered)


def _integer_of(value: Any) -> Any:
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip()) else value


def _not_blank(text: str) -> str:
    if not text.strip():
        raise Malformed("is empty")
    return text.strip()


Text = Annotated[str, Field(max_length=20_000), AfterValidator(_not_blank)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_integer_of)]
Seconds = Annotated[float, BeforeValidator(seconds_of)]
Clip = Annotated[tuple[float, float], BeforeValidator(clip_of)]
Options = Annotated[tuple[Text, ...], Field(min_length=2), BeforeValidator(_options_of)]


def reason_of(error: ValueError) -> str:
    """Say in a line why a record cannot be used."""
    if not isinstance(error, ValidationError):
        return shown(str(error))
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return shown(f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": "))


def shown(value: Any) -> str:
    """A value of somebody else's file in a line of ours: short, and nothing that a terminal obeys."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= 160 else f"{text[:157]}..."
    return short if short.isprintable() else ascii(short)[1:-1]


def listed(options: tuple[str, ...]) -> str:
    """The options, a line each."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))
