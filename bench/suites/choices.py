"""Multiple choice: options without their letters, the right letter, and the options as a prompt lists them."""

from __future__ import annotations

import re

from edgevlm.bench.suites.fields import Fields, Malformed
from edgevlm.bench.suites.schema import LETTERS


def options_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Two options or more, without ``A.`` or ``(A)`` before them."""
    options = fields.texts(name, least=2)
    if len(options) > len(LETTERS):
        raise Malformed(f"{name} has {len(options)} entries, more than there are letters")
    return tuple(
        re.sub(rf"^\(?{letter}[.):]\s*", "", option) or option for letter, option in zip(LETTERS, options, strict=False)
    )


def letter_of(fields: Fields, name: str, options: tuple[str, ...]) -> str:
    """The right letter, given as a letter, ``B.`` and ``(B)`` too. Raises Malformed for one that no option has."""
    given = fields.text(name).strip("().: ").upper()
    if len(given) != 1 or given not in LETTERS[: len(options)]:
        raise Malformed(f"{name} is {given[:20]!a}, not a letter of its {len(options)} options")
    return given


def letter_at(fields: Fields, name: str, options: tuple[str, ...]) -> str:
    """The right letter, given as an index from 0."""
    index = fields.whole(name)
    if index >= len(options):
        raise Malformed(f"{name} is {index}, not an index of its {len(options)} options")
    return LETTERS[index]


def letter_for(fields: Fields, name: str, options: tuple[str, ...]) -> str:
    """The right letter, given as the option's text."""
    (answer,) = Fields({name: [fields.value(name)]}).texts(name)
    if answer not in options:
        raise Malformed(f"{name} is {answer[:40]!a}, not one of its options")
    return LETTERS[options.index(answer)]


def listed(options: tuple[str, ...], form: str = "{letter}. {text}") -> str:
    """The options, a line each."""
    return "\n".join(form.format(letter=letter, text=text) for letter, text in zip(LETTERS, options, strict=False))
