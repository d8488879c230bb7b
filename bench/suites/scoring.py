"""From an answer as it was saved to marks, one a thing asked for; from marks to the columns of a suite's table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from edgevlm.calib.intervals import fraction_right

Record = dict[str, Any]
Line = dict[str, Any]
Marks = tuple[bool, ...]

WINDOW_S = 2.0  # how far from its moment a proactive answer may come (StreamingBench)


def marks_of(record: Record) -> Marks | None:
    """Marks of a saved answer; None: not scored here, or not answered.

    Reads ``scoring``, ``response``, ``answer``, ``options`` and times.
    """
    if record.get("error"):
        return None
    marks = SCORINGS[record["scoring"]](record)
    return (marks,) if isinstance(marks, bool) else marks


def _proactive(record: Record) -> bool:
    """Asked for by the model within two seconds of the moment, and the response contains the output."""
    at = record["triggered_s"]
    return at is not None and abs(at - record["due_s"]) <= WINDOW_S and contains(record["response"], record["answer"])


def _steps(record: Record) -> Marks:
    """One mark a step, by its line of the response and the nearest label; a step without a line is wrong (COIN)."""
    lines = [re.sub(r"^\s*\d+\s*[.):]\s*", "", line) for line in record["response"].splitlines() if line.strip()]
    wanted = record["answer"].split("\n")
    said = [nearest(_plain(line), record["options"]) for line in lines[: len(wanted)]]
    return tuple(index < len(said) and said[index] == step for index, step in enumerate(wanted))


SCORINGS: dict[str, Callable[[Record], Marks | bool | None]] = {
    # StreamingBench: the first character is the right letter
    "first-letter": lambda record: record["response"].strip()[:1] == record["answer"],
    # OVO-Bench: the right letter occurs; all digits are the right number; yes or no occurs, or its first letter is all
    "letter-within": lambda record: record["answer"] in record["response"],
    "digits": lambda record: "".join(re.findall(r"[0-9]+", record["response"])) == record["answer"],
    "yes-no": lambda record: record["response"] == record["answer"][0] or record["answer"] in record["response"],
    "proactive": _proactive,
    # COIN: the label nearest by edit distance
    "nearest": lambda record: nearest(_plain(record["response"]), record["options"]) == record["answer"],
    "steps": _steps,
    "judge": lambda record: record.get("verdict"),
}


def contains(response: str, output: str) -> bool:
    """Whether ``output`` occurs in the response as whole words, but for case, punctuation and spaces."""
    said, wanted = (" ".join(["", *re.findall(r"\w+", text.casefold()), ""]) for text in (response, output))
    return bool(wanted.strip()) and wanted in said


def _plain(text: str) -> str:
    return text.strip().lower().rstrip(".")


def nearest(text: str, labels: Iterable[str]) -> str:
    """The label of the smallest edit distance to ``text``; the first in the alphabet of several."""
    best: tuple[int, str] | None = None
    for label in sorted(labels, key=lambda label: abs(len(label) - len(text))):
        if best is not None and abs(len(label) - len(text)) > best[0]:  # the distance is at least the difference in length
            break
        found = (edit_distance(text, label), label)
        best = found if best is None else min(best, found)
    return best[1] if best else ""


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: how many characters to insert, delete or replace."""
    row = list(range(len(b) + 1))
    for index, char in enumerate(a, 1):
        before, row[0] = row[0], index
        for place, other in enumerate(b, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (char != other))
    return row[-1]


class Scores:
    """Columns from the answers of one policy at one budget, records as saved; a column is a line without the policy's name."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = list(records)

    def among(self, category: str | None = None, subtask: str | None = None) -> list[Record]:
        def is_wanted(record: Record) -> bool:
            return category in (None, record["category"]) and subtask in (None, record["subtask"])

        return [record for record in self._records if is_wanted(record)]

    def accuracy(self, name: str, category: str | None = None, subtask: str | None = None) -> Line:
        """The fraction right of all marks, each question with its weight in marks; the interval's unit is the video."""
        clusters: dict[str, list[bool]] = {}
        for record in self.among(category, subtask):
            clusters.setdefault(record["video"], []).extend(marks_of(record) or ())
        line: Line = {"column": name, "accuracy": None}
        if asked := [cluster for cluster in clusters.values() if cluster]:
            of = fraction_right(asked)
            line |= {"accuracy": of.value, "ci_low": of.low, "ci_high": of.high, "questions": of.count, "videos": of.clusters}
        return line

    def subtasks(self, names: Sequence[str], category: str | None = None) -> Iterator[Line]:
        """A column a subtask that was asked, in the order of ``names``, then others."""
        asked = dict.fromkeys(record["subtask"] for record in self.among(category))
        for name in [*(name for name in names if name in asked), *(name for name in asked if name not in names)]:
            yield self.accuracy(name, category, name)

    def rating(self, name: str, category: str | None = None) -> Line:
        """The mean of the judge's ratings, 0 to 5."""
        ratings = [record["rating"] for record in self.among(category) if record.get("rating") is not None]
        return {"column": name, "rating": sum(ratings) / len(ratings) if ratings else None}


def mean(name: str, columns: Sequence[Line]) -> Line:
    """The mean of the columns that have a value, each counting the same."""
    values = [column["accuracy"] for column in columns if column["accuracy"] is not None]
    return {"column": name, "accuracy": sum(values) / len(values) if values else None}
