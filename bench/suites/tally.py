"""From marked answers to the columns of a suite's table: shares with intervals, and means of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from edgevlm.bench.suites.scoring import Marks
from edgevlm.calib.accuracy.intervals import Estimate, share


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
    """estimate: of a share of marks, its unit the video; value: the same, or a mean of columns or ratings; None: no answers.

    head: the short name at the top of a table; rating: the value is a judge's, 0 to 5, not a share.
    """

    head: str
    name: str
    value: float | None
    estimate: Estimate | None = None
    rating: bool = False


class Tally:
    """The answers of one policy at one budget."""

    def __init__(self, results: Iterable[ScoredAnswer]) -> None:
        self.results = list(results)

    def share(self, head: str, name: str, *, category: str | None = None, subtask: str | None = None) -> Column:
        """The share right of all marks of a category, a subtask, or all, each question with its weight in marks."""
        clusters: dict[str, list[bool]] = {}
        for result in self._among(category, subtask):
            clusters.setdefault(result.video, []).extend(result.marks or ())
        asked = [cluster for cluster in clusters.values() if cluster]
        estimate = share(asked) if asked else None
        return Column(head, name, estimate.value if estimate else None, estimate)

    def shares(self, heads: dict[str, str], category: str | None = None) -> Iterator[Column]:
        """A column a subtask, in the order of ``heads``, those that were asked; then subtasks that ``heads`` does not have."""
        asked = dict.fromkeys(result.subtask for result in self._among(category, None))
        for subtask in [*(name for name in heads if name in asked), *(name for name in asked if name not in heads)]:
            yield self.share(heads.get(subtask, subtask), subtask, category=category, subtask=subtask)

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
