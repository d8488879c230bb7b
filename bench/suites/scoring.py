"""Score saved answers and compute the columns of a suite's result table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from edgevlm.calib.intervals import fraction_right

Record = dict[str, Any]
Line = dict[str, Any]

WINDOW_S = 2.0  # a proactive answer may come this many seconds before or after the right moment (StreamingBench)


def is_right(record: Record) -> bool | None:
    """Return whether a saved answer is right according to its ``scoring``, or None if the question was not answered."""
    return None if record.get("error") else SCORINGS[record["scoring"]](record)


def _proactive(record: Record) -> bool:
    """Return whether the model spoke within WINDOW_S of the right moment and its response contains the expected output."""
    at = record["triggered_s"]
    return at is not None and abs(at - record["due_s"]) <= WINDOW_S and contains(record["response"], record["answer"])


SCORINGS: dict[str, Callable[[Record], bool]] = {
    # StreamingBench: the response's first character is the right letter
    "first-letter": lambda record: record["response"].strip()[:1] == record["answer"],
    # OVO-Bench, depending on the task: the response contains the right letter, the right digits or the right word
    "letter-within": lambda record: record["answer"] in record["response"],
    "digits": lambda record: "".join(re.findall(r"[0-9]+", record["response"])) == record["answer"],
    "yes-no": lambda record: record["response"] == record["answer"][0] or record["answer"] in record["response"],
    "proactive": _proactive,
}


def contains(response: str, output: str) -> bool:
    """Return whether ``output`` occurs in the response as whole words, ignoring case, punctuation and spaces."""
    said, wanted = (" ".join(["", *re.findall(r"\w+", text.casefold()), ""]) for text in (response, output))
    return bool(wanted.strip()) and wanted in said


class Scores:
    """Computes table columns from one policy's saved answers at one budget."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = list(records)

    def accuracy(self, name: str, category: str | None = None, subtask: str | None = None) -> Line:
        """Return the fraction of right answers, with a confidence interval clustered by video."""
        clusters: dict[str, list[bool]] = {}
        for record in self._records:
            right = is_right(record)
            if category in (None, record["category"]) and subtask in (None, record["subtask"]) and right is not None:
                clusters.setdefault(record["video"], []).append(right)
        line: Line = {"column": name, "accuracy": None}
        if clusters:
            of = fraction_right(list(clusters.values()))
            line |= {"accuracy": of.value, "ci_low": of.low, "ci_high": of.high, "questions": of.count, "videos": of.clusters}
        return line

    def subtasks(self, names: Sequence[str], category: str) -> Iterator[Line]:
        """Yield a column for each subtask that has questions. The subtasks in ``names`` come first."""
        asked = dict.fromkeys(record["subtask"] for record in self._records if record["category"] == category)
        for name in sorted(asked, key=lambda name: names.index(name) if name in names else len(names)):
            yield self.accuracy(name, category, name)


def mean(name: str, columns: Sequence[Line]) -> Line:
    """Return the unweighted mean of the columns that have a value."""
    values = [column["accuracy"] for column in columns if column["accuracy"] is not None]
    return {"column": name, "accuracy": sum(values) / len(values) if values else None}
