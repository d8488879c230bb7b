"""From an answer as it was saved to marks, one a thing asked for; from marks to the columns of a suite's table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgevlm.bench.suites.dataset import Dataset, SuiteQuestion
from edgevlm.calib.intervals import Estimate, fraction_right

Record = dict[str, Any]
Marks = tuple[bool, ...]

WINDOW_S = 2.0  # how far from its moment a proactive answer may come (StreamingBench)


def marks_of(record: Record) -> Marks | None:
    """Marks of a saved answer; None: not scored here. Reads ``scoring``, ``response``, ``answer``, ``options`` and times.

    A question that could not be answered, for want of room or of frames, has none either.
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
    # the judge's verdict, where there is one: nothing else says whether an open answer is right
    "judge": lambda record: record.get("verdict"),
}


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


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One answer. marks: None where it is not scored; rating: a judge's, 0 to 5."""

    video: str
    category: str
    subtask: str
    marks: Marks | None
    rating: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """estimate: of a fraction of marks, its unit the video; value: the same, or a mean of columns or ratings; None: no answers.

    head: the short name at the top of a table; rating: the value is a judge's, 0 to 5, not a fraction.
    """

    head: str
    name: str
    value: float | None
    estimate: Estimate | None = None
    rating: bool = False


class SuiteScores:
    """The answers of one policy at one budget."""

    def __init__(self, results: Iterable[ScoredAnswer]) -> None:
        self.results = list(results)

    def accuracy(self, head: str, name: str, *, category: str | None = None, subtask: str | None = None) -> Column:
        """The fraction right of all marks of a category, a subtask, or all, each question with its weight in marks."""
        clusters: dict[str, list[bool]] = {}
        for result in self._among(category, subtask):
            clusters.setdefault(result.video, []).extend(result.marks or ())
        asked = [cluster for cluster in clusters.values() if cluster]
        estimate = fraction_right(asked) if asked else None
        return Column(head, name, estimate.value if estimate else None, estimate)

    def accuracies(self, heads: dict[str, str], category: str | None = None) -> Iterator[Column]:
        """A column a subtask, in the order of ``heads``, those that were asked; then subtasks that ``heads`` does not have."""
        asked = dict.fromkeys(result.subtask for result in self._among(category, None))
        for subtask in [*(name for name in heads if name in asked), *(name for name in asked if name not in heads)]:
            yield self.accuracy(heads.get(subtask, subtask), subtask, category=category, subtask=subtask)

    def rating(self, head: str, name: str, category: str | None = None) -> Column:
        """The mean of the judge's ratings."""
        ratings = [result.rating for result in self._among(category, None) if result.rating is not None]
        return Column(head, name, sum(ratings) / len(ratings) if ratings else None, rating=True)

    def _among(self, category: str | None, subtask: str | None) -> Iterator[ScoredAnswer]:
        for result in self.results:
            if category in (None, result.category) and subtask in (None, result.subtask):
                yield result


def mean(head: str, name: str, columns: Sequence[Column]) -> Column:
    """The mean of the columns that have a value, each counting the same."""
    values = [column.value for column in columns if column.value is not None]
    return Column(head, name, sum(values) / len(values) if values else None)


@dataclass(frozen=True, slots=True)
class Suite:
    """A published benchmark. read: the questions of a data folder; columns: its table's, of what was answered."""

    read: Callable[[Dataset], Iterable[SuiteQuestion]]
    columns: Callable[[SuiteScores], Iterator[Column]]
