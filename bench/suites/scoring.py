"""Scores: from an answer as it was saved to marks, one a thing asked for, right or wrong; none where nothing says which."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from edgevlm.bench.suites.schema import LETTERS

Record = dict[str, Any]
Marks = tuple[bool, ...]

WINDOW_S = 2.0  # how far from its moment a proactive answer may come (StreamingBench)


def marks_of(record: Record) -> Marks | None:
    """Marks of a saved answer; None: not scored here. Reads ``scoring``, ``response``, ``answer``, ``options`` and times.

    A question that could not be answered, for want of room or of frames, has none either.
    """
    if record.get("error") or not record["answer"]:
        return None
    return SCORINGS[record["scoring"]](record)


def _first_letter(record: Record) -> Marks:
    """The first character of the response is the right letter (StreamingBench)."""
    return (record["response"].strip()[:1] == record["answer"],)


def _letter_within(record: Record) -> Marks:
    """The right letter occurs in the response, wherever (OVO-Bench)."""
    return (record["answer"] in record["response"],)


def _choice(record: Record) -> Marks:
    """The option that the response chooses, see :func:`chosen_letter`, is the right one."""
    return (chosen_letter(record["response"], record["options"]) == record["answer"],)


def _digits(record: Record) -> Marks:
    """All digits of the response, put together, are the right number (OVO-Bench, REC)."""
    return ("".join(re.findall(r"[0-9]+", record["response"])) == record["answer"],)


def _yes_no(record: Record) -> Marks:
    """``Yes`` or ``No`` occurs in the response as it should, or the response is its first letter alone (OVO-Bench)."""
    return (record["response"] == record["answer"][0] or record["answer"] in record["response"],)


def _proactive(record: Record) -> Marks:
    """Asked for by the model within two seconds of the moment, and the response contains the output."""
    at = record["triggered_s"]
    in_time = at is not None and abs(at - record["due_s"]) <= WINDOW_S
    return (in_time and contains(record["response"], record["answer"]),)


def _nearest(record: Record) -> Marks:
    """The label nearest to the response by edit distance is the right one (COIN)."""
    return (nearest(_plain(record["response"]), record["options"]) == record["answer"],)


def _steps(record: Record) -> Marks:
    """One mark a step, by its line of the response and the nearest label; a step without a line is wrong (COIN)."""
    lines = [re.sub(r"^\s*\d+\s*[.):]\s*", "", line) for line in record["response"].splitlines() if line.strip()]
    wanted = record["answer"].split("\n")
    said = [nearest(_plain(line), record["options"]) for line in lines[: len(wanted)]]
    return tuple(index < len(said) and said[index] == step for index, step in enumerate(wanted))


def _judged(record: Record) -> Marks | None:
    """The judge's verdict, where there is one: nothing else says whether an open answer is right."""
    right = record.get("verdict")
    return None if right is None else (bool(right),)


SCORINGS: dict[str, Callable[[Record], Marks | None]] = {
    "first-letter": _first_letter,
    "letter-within": _letter_within,
    "choice": _choice,
    "digits": _digits,
    "yes-no": _yes_no,
    "proactive": _proactive,
    "nearest": _nearest,
    "steps": _steps,
    "judge": _judged,
}


def chosen_letter(response: str, options: tuple[str, ...] | list[str]) -> str | None:
    """The letter a response chooses: the first that stands alone, as in ``B``, ``(B)``, ``B.`` and ``the answer is B``.

    An ``A`` or ``I`` that a sentence goes on from is a word. Without a letter, the one option whose text occurs in the
    response.
    """
    valid = LETTERS[: len(options)]
    text = response.strip()
    leading = re.match(rf"[(\[]?([{valid}])(?:[)\].:,]|\s*$|\n)", text)
    if leading:
        return leading[1]
    for found in re.finditer(rf"(?<![\w'])([{valid}])(?![\w'])", text):
        if found[1] not in "AI" or not re.match(r"\s+[a-z]", text[found.end() :]):
            return found[1]
    named = [letter for letter, option in zip(valid, options, strict=False) if contains(response, option)]
    return named[0] if len(named) == 1 else None


def contains(response: str, output: str) -> bool:
    """Whether ``output`` occurs in the response as whole words, but for case, punctuation and spaces."""
    return f" {_words(output)} " in f" {_words(response)} " and bool(_words(output))


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _plain(text: str) -> str:
    return text.strip().lower().rstrip(".")


def nearest(text: str, labels: tuple[str, ...] | list[str]) -> str:
    """The label of the smallest edit distance to ``text``; the first in the alphabet of several."""
    best = (len(text) + max(map(len, labels)) + 1, "")
    for label in sorted(labels, key=lambda label: abs(len(label) - len(text))):
        if abs(len(label) - len(text)) > best[0]:  # the distance is at least the difference in length
            break
        best = min(best, (edit_distance(text, label), label))
    return best[1]


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: how many characters to insert, delete or replace."""
    row = list(range(len(b) + 1))
    for index, char in enumerate(a, 1):
        before, row[0] = row[0], index
        for place, other in enumerate(b, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (char != other))
    return row[-1]
