"""The journal: the model's descriptions of what it saw, with full-text search."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgevlm.apps.run.clock import clock_time
from edgevlm.apps.run.output import wall_clock
from edgevlm.apps.store import TimedDatabase

COLUMNS = "camera, time, text, evidence"
HEADING = "Notes from before, by the clock:"
WORDS = 64  # maximum number of words in a search


@dataclass(frozen=True, slots=True)
class Line:
    """A line about what a camera saw at ``time`` (seconds since 1970). ``evidence`` has the format of an answer's JSON."""

    camera: str
    time: float
    text: str
    evidence: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        return f"{clock_time(self.time)} {self.camera}: {self.text}"

    def json(self) -> dict[str, Any]:
        return {"time": wall_clock(self.time), "camera": self.camera, "text": self.text, "evidence": list(self.evidence)}


class Journal(TimedDatabase):
    """The journal lines of all cameras."""

    FILE, TABLE, DAYS, CAP = "journal.sqlite", "lines", 365.0, 64 << 20
    TABLES = "CREATE VIRTUAL TABLE IF NOT EXISTS lines USING fts5(text, camera UNINDEXED, time UNINDEXED, evidence UNINDEXED);"
    MEANWHILE = "new lines are lost until it can be written"
    SPARE = (
        "DELETE FROM lines WHERE rowid IN "
        "(SELECT rowid FROM lines ORDER BY rowid LIMIT 1 + (SELECT count(*) FROM lines) / 4)",
    )  # fmt: skip

    def add(self, line: Line, since: int | None = None) -> None:
        """Store a line. Disk errors are not raised.

        ``since``: the value of :attr:`forgotten` when this line began. If lines have been deleted since, nothing is stored.
        """

        def write() -> None:
            values = (line.camera, line.time, line.text, json.dumps(list(line.evidence)))
            self._run(f"INSERT INTO lines ({COLUMNS}) VALUES (?, ?, ?, ?)", *values)
            self._works_again()

        with self._lock:
            if since in (None, self.forgotten):
                self._attempt(write, None)
                self._attempt(self.prune, None)

    def query(
        self,
        search: str | None = None,
        since: float | None = None,
        until: float | None = None,
        camera: str | None = None,
        limit: int = 100,
        *,
        any_word: bool = False,
    ) -> list[Line]:
        """Return the lines that contain all words of ``search``, newest first.

        ``since`` and ``until`` are inclusive and in seconds since 1970. With ``any_word``, return the lines that contain any of
        the words, best match (BM25) first.
        """
        words = [f'"{word}"' for word in re.findall(r"\w+", search or "")[:WORDS]]  # quotes make AND, OR and NOT plain words
        if search is not None and not words:
            return []
        match = (" OR " if any_word else " ").join(words) or None
        where = {"lines MATCH ?": match, "time >= ?": since, "time <= ?": until, "camera = ?": camera}
        found = self._find(COLUMNS, where, "rank" if any_word else "time DESC", limit)
        return [Line(camera, at, text, tuple(json.loads(evidence))) for camera, at, text, evidence in found]

    def _purge(self) -> None:
        self._run("INSERT INTO lines(lines) VALUES ('rebuild')")  # otherwise the index keeps words of deleted lines


def with_notes(question: str, lines: list[Line]) -> str:
    """Put journal lines, oldest first, in front of a question."""
    said = [f"{clock_time(line.time)}: {line.text}" for line in sorted(lines, key=lambda line: line.time)]
    return "\n".join([HEADING, *said, "", question]) if lines else question
