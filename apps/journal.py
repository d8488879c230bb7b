"""A journal in words: what the model said it saw, line by line, in SQLite with full-text search. It outlives the memory."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgevlm.apps.run.clock import clock_time
from edgevlm.apps.run.events import wall_clock
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.files import PRIVATE, private_folder

FILE = "journal.sqlite"
DAYS, CAP = 365.0, 64 << 20  # that lines are kept, and bytes of the file
SCHEMA = "CREATE VIRTUAL TABLE IF NOT EXISTS lines USING fts5(text, camera UNINDEXED, time UNINDEXED, evidence UNINDEXED)"
COLUMNS = "camera, time, text, evidence"
HEADING = "Notes from before, by the clock:"
WORDS = 64  # of a search


@dataclass(frozen=True, slots=True)
class Line:
    """What was seen by a camera at ``time``, seconds since 1970. evidence: moments, as an answer's JSON has them."""

    camera: str
    time: float
    text: str
    evidence: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        return f"{clock_time(self.time)} {self.camera}: {self.text}"

    def json(self) -> dict[str, Any]:
        return {"time": wall_clock(self.time), "camera": self.camera, "text": self.text, "evidence": list(self.evidence)}


class Journal:
    """Lines of all cameras in one folder. Any thread may call any method.

    Lines older than ``days`` go, and the oldest where the file passes ``cap`` bytes. notify: is told, once, when the disk does
    not take a line. Raises UserError for a file that cannot be opened.
    """

    def __init__(self, folder: Path, notify: Notify = lambda line: None, *, days: float = DAYS, cap: int = CAP) -> None:
        self._path, self._notify, self._days, self._cap = folder / FILE, notify, days, cap
        self._lock, self._told = threading.Lock(), False
        self.forgotten = 0  # times that something was
        try:
            private_folder(folder)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600))
            self._database = sqlite3.connect(self._path, timeout=2.0, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA secure_delete = ON")
            self._database.execute(SCHEMA)
            self._database.execute(f"SELECT {COLUMNS} FROM lines LIMIT 0")
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"{self._path}: cannot be opened ({error}); move it away, or choose another --state") from None

    def add(self, line: Line, since: int | None = None) -> None:
        """Keep a line, unless something was :attr:`forgotten` since it was asked for. Never raises for what the disk does."""
        with self._lock:
            if since not in (None, self.forgotten):
                return
            try:
                evidence = json.dumps(list(line.evidence))
                self._run(f"INSERT INTO lines ({COLUMNS}) VALUES (?, ?, ?, ?)", line.camera, line.time, line.text, evidence)
                self._shrink()
            except (OSError, sqlite3.Error) as error:
                if not self._told:
                    self._notify(f"{self._path}: the journal is not written ({error}); the streams go on")
                self._told = True

    def query(
        self,
        search: str | None = None,
        since: float | None = None,
        until: float | None = None,
        camera: str | None = None,
        limit: int = 100,
    ) -> list[Line]:
        """Lines, newest first; those that hold all words of ``search``. since, until: seconds since 1970, both included."""
        match = None if search is None else _words(search, " ")
        return self._found(match, since, until, camera, limit, "time DESC")

    def relevant(self, question: str, since: float | None, until: float | None, camera: str, limit: int = 32) -> list[Line]:
        """Lines that have words of a question, the best match first (BM25)."""
        return self._found(_words(question, " OR "), since, until, camera, limit, "rank")

    def forget(self, since: float | None = None, until: float | None = None, camera: str | None = None) -> int:
        """Delete lines of a time, index and all; returns how many. Raises UserError where the disk does not take it."""
        with self._lock:
            self.forgotten += 1
            try:
                before = self._run("SELECT count(*) FROM lines")[0][0]
                self._run(
                    "DELETE FROM lines WHERE time >= ? AND time <= ? AND camera = coalesce(?, camera)",
                    -1e300 if since is None else since, 1e300 if until is None else until, camera,
                )  # fmt: skip
                self._purge()
                return int(before - self._run("SELECT count(*) FROM lines")[0][0])
            except sqlite3.Error as error:
                raise UserError(f"{self._path}: lines cannot be deleted ({error})") from None

    def close(self) -> None:
        """Closing again does nothing."""
        with self._lock:
            self._database.close()

    def _shrink(self) -> None:
        """A day's lines at once, or a quarter of all: the file is then made anew."""
        oldest, before = self._run("SELECT min(time) FROM lines")[0][0], time.time() - 86_400 * self._days
        if oldest < before - 86_400:
            self._run("DELETE FROM lines WHERE time < ?", before)
        elif self._path.stat().st_size > self._cap:
            oldest = "SELECT rowid FROM lines ORDER BY time LIMIT 1 + (SELECT count(*) FROM lines) / 4"
            self._run(f"DELETE FROM lines WHERE rowid IN ({oldest})")
        else:
            return
        self._purge()

    def _purge(self) -> None:
        """The index keeps words of deleted lines until it is made anew."""
        self._run("INSERT INTO lines(lines) VALUES ('rebuild')")
        self._run("VACUUM")

    def _found(
        self, match: str | None, since: float | None, until: float | None, camera: str | None, limit: int, order: str
    ) -> list[Line]:
        where: dict[str, Any] = {"lines MATCH ?": match, "time >= ?": since, "time <= ?": until, "camera = ?": camera}
        given = {condition: value for condition, value in where.items() if value is not None}
        statement = f"SELECT {COLUMNS} FROM lines WHERE {' AND '.join(given) or '1'} ORDER BY {order} LIMIT ?"
        if match == "":
            return []
        with self._lock, suppress(sqlite3.Error):
            rows = self._run(statement, *given.values(), limit)
            return [Line(camera, at, text, tuple(json.loads(evidence))) for camera, at, text, evidence in rows]
        return []

    def _run(self, statement: str, *values: Any) -> list[Any]:
        return self._database.execute(statement, values).fetchall()


def _words(text: str | None, between: str) -> str:
    """A full-text query of the words of a text: nothing in it is an operator."""
    return between.join(f'"{word}"' for word in re.findall(r"\w+", text or "")[:WORDS])


def with_notes(question: str, lines: list[Line], fits: Callable[[str], bool]) -> str:
    """A question behind those lines that fit, the best first, in the order of time; as it is where none does."""
    chosen: list[Line] = []
    for line in lines:
        if fits(_asked(question, [*chosen, line])):
            chosen.append(line)
    return _asked(question, chosen) if chosen else question


def _asked(question: str, lines: list[Line]) -> str:
    said = [f"{clock_time(line.time)}: {line.text}" for line in sorted(lines, key=lambda line: line.time)]
    return "\n".join([HEADING, *said, "", question])
