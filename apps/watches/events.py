"""Store the events of watches in an SQLite file, until they are sent and expire."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

from edgevlm.apps.run.output import wall_clock
from edgevlm.apps.schemas import SCHEMA
from edgevlm.apps.store import TimedDatabase

UNWRITTEN = 1000
MOST = 10_000  # a digest covers at most this many events and as many journal lines
COLUMNS = "camera, watch, state, time, probability, opened, evidence, question"
TENTH = "LIMIT (SELECT 1 + count(*) / 10 FROM events)"
SENT = "number NOT IN (SELECT event FROM outbox)"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """An event that says that a watch opened or closed.

    ``time``: when the watch opened or closed, in seconds since 1970. ``opened``: when the watch opened, in seconds since 1970.
    ``evidence``: the moments on which the answer is based, as in an answer's JSON. ``question`` is not part of the event's
    JSON.
    """

    camera: str
    watch: str
    state: Literal["open", "close"]
    time: float
    probability: float
    opened: float
    evidence: Sequence[Mapping[str, Any]] = ()
    question: str = ""

    @property
    def id(self) -> str:
        """The event's id: 32 hexadecimal digits that depend on the camera, the watch, the state and the opening time in ms."""
        about = json.dumps([self.camera, self.watch, round(1e3 * self.opened), self.state])
        return hashlib.sha256(about.encode()).hexdigest()[:32]

    def json(self) -> dict[str, Any]:
        """Return the event's JSON, which every sink and ``/v1/events`` send."""
        return {
            "event": "watch", "schema": SCHEMA, "id": self.id, "watch": self.watch, "camera": self.camera, "state": self.state,
            "time": wall_clock(self.time), "probability": round(self.probability, 4), "evidence": list(self.evidence),
        }  # fmt: skip

    def line(self) -> str:
        return json.dumps(self.json())

    @property
    def names(self) -> str:
        return f"{self.camera} {self.watch} {self.question}".lower()

    def is_of(self, camera: str | None, since: float, until: float) -> bool:
        return camera in (None, self.camera) and any(since <= at <= until for at in (self.time, self.opened))


@dataclass(frozen=True, slots=True)
class Opening:
    """A period in which a watch was open.

    ``event``: the event that opened the watch. ``closed``: when the watch closed, in seconds since 1970, or None if the watch
    is still open.
    """

    event: WatchEvent
    closed: float | None = None

    def json(self) -> dict[str, Any]:
        """Return the JSON for ``GET /v1/digest`` and ``edgevlm digest --json``."""
        event, closed = self.event, self.closed
        return {
            "camera": event.camera, "watch": event.watch, "question": event.question, "opened": wall_clock(event.opened),
            "closed": None if closed is None else wall_clock(closed),
            "seconds": None if closed is None else round(closed - event.opened, 3),
            "probability": round(event.probability, 4), "evidence": list(event.evidence),
        }  # fmt: skip


@dataclass
class Unwritten:
    """An event that is not yet on the disk, and the sinks that must still receive it."""

    event: WatchEvent
    pictures: Sequence[bytes | None]
    sinks: set[str]


class EventStore(TimedDatabase):
    """Stores events, sent or not yet sent, in a file that only this process opens.

    :meth:`record` returns once the event is on the disk. While writing fails, events are sent from memory, where at most
    UNWRITTEN events are kept. If the file exceeds CAP, the oldest pictures are deleted first, then the oldest events. Events
    older than DAYS days are deleted once they are sent.
    """

    FILE, TABLE, TIMES, DAYS, CAP = "events.sqlite", "events", ("time", "opened"), 30.0, 64 << 20
    MEANWHILE = "events are held in memory and sent from there"
    PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON")
    TABLES = """
    CREATE TABLE IF NOT EXISTS events (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, camera TEXT NOT NULL, watch TEXT NOT NULL,
        state TEXT NOT NULL, time REAL NOT NULL, probability REAL NOT NULL, opened REAL NOT NULL, evidence TEXT NOT NULL,
        question TEXT NOT NULL);
    CREATE INDEX IF NOT EXISTS events_by_time ON events (time);
    CREATE TABLE IF NOT EXISTS pictures (
        event INTEGER NOT NULL REFERENCES events ON DELETE CASCADE, place INTEGER NOT NULL, jpeg BLOB NOT NULL,
        PRIMARY KEY (event, place));
    CREATE TABLE IF NOT EXISTS outbox (
        sink TEXT NOT NULL, event INTEGER NOT NULL REFERENCES events ON DELETE CASCADE, PRIMARY KEY (sink, event)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS outbox_by_event ON outbox (event);
    """
    MAY_GO = SENT
    SPARE = (
        f"DELETE FROM pictures WHERE event IN (SELECT DISTINCT event FROM pictures ORDER BY event {TENTH})",
        f"DELETE FROM events WHERE number IN (SELECT number FROM events WHERE {SENT} ORDER BY number {TENTH})",
        f"DELETE FROM events WHERE number IN (SELECT number FROM events ORDER BY number {TENTH})",
    )

    def __init__(self, *given: Any, **kept: Any) -> None:
        self._unwritten: dict[str, Unwritten] = {}
        self._sent: set[tuple[str, str]] = set()  # sink and event id of each sent event that the disk still lists as unsent
        super().__init__(*given, **kept)
        self._attempt(self.prune, None)

    def record(self, event: WatchEvent, pictures: Sequence[bytes | None] = (), sinks: Iterable[str] = ()) -> None:
        """Write an event and the sinks that must receive it. An event whose id is already stored is ignored.

        ``pictures``: a JPEG or None for each moment of the event's evidence; the moment's ``jpeg_url`` is the JPEG's address.
        """
        urls = [f"/v1/events/{event.id}/{place}.jpg" if jpeg else None for place, jpeg in enumerate(pictures)]
        evidence = [{**moment, "jpeg_url": url} for moment, url in zip_longest(event.evidence, urls) if moment is not None]
        with self._lock:
            self._unwritten.setdefault(event.id, Unwritten(replace(event, evidence=evidence), pictures, set(sinks)))
            self._write()
            for oldest in list(self._unwritten)[:-UNWRITTEN]:
                del self._unwritten[oldest]

    def next(self, sink: str) -> tuple[WatchEvent, list[bytes]] | None:
        """Return the oldest event that must still be sent to a sink, with its pictures, or None."""
        statement = f"SELECT number, id, {COLUMNS} FROM outbox JOIN events ON event = number WHERE sink = ? ORDER BY number"

        def on_disk() -> tuple[WatchEvent, list[bytes]] | None:
            for number, event_id, *row in self._open().execute(statement, (sink,)):
                if (sink, event_id) not in self._sent:
                    pictures = self._run("SELECT jpeg FROM pictures WHERE event = ? ORDER BY place", number)
                    return _event(*row), [jpeg for (jpeg,) in pictures]
            return None

        with self._lock:
            self._write()
            held = (each for each in self._unwritten.values() if sink in each.sinks)
            in_memory = next(((each.event, [jpeg for jpeg in each.pictures if jpeg]) for each in held), None)
            return self._attempt(on_disk, None) or in_memory

    def sent(self, sink: str, event_id: str) -> None:
        with self._lock:
            if event_id in self._unwritten:
                self._unwritten[event_id].sinks.discard(sink)
            self._sent.add((sink, event_id))
            self._write()

    def waiting(self) -> dict[str, int]:
        with self._lock:
            rows = self._rows("SELECT sink, count(*) FROM outbox GROUP BY sink")
            return Counter(dict(rows)) + Counter(sink for each in self._unwritten.values() for sink in each.sinks)

    def unsent(self) -> set[str]:
        with self._lock:
            rows = self._rows("SELECT DISTINCT id FROM events JOIN outbox ON event = number")
            return {row[0] for row in rows} | {key for key, each in self._unwritten.items() if each.sinks}

    def drop(self, sink: str) -> None:
        with self._lock:
            for each in self._unwritten.values():
                each.sinks.discard(sink)
            self._rows("DELETE FROM outbox WHERE sink = ?", sink)

    def query(
        self,
        since: float | None = None,
        until: float | None = None,
        camera: str | None = None,
        watch: str | None = None,
        text: str | None = None,
        limit: int = 100,
    ) -> list[WatchEvent]:
        """Return the events from ``since`` to ``until`` (seconds since 1970, both included), newest first.

        ``text``: return only events whose camera, watch or question contains this text.
        """
        where: dict[str, Any] = {"time >= ?": since, "time <= ?": until, "camera = ?": camera, "watch = ?": watch}
        where["instr(lower(camera || char(10) || watch || char(10) || question), lower(?))"] = text or None
        return [_event(*row) for row in self._find(COLUMNS, where, "time DESC, number DESC", limit)]

    def last(self, camera: str, watch: str) -> WatchEvent | None:
        """Return the newest recorded event of a watch."""
        with self._lock:
            held = [each.event for each in self._unwritten.values()]
            rows = self._find(COLUMNS, {"camera = ?": camera, "watch = ?": watch}, "number DESC", 1)
        found = [*(_event(*row) for row in rows), *(each for each in held if (each.camera, each.watch) == (camera, watch))]
        return found[-1] if found else None

    def open_now(self) -> list[WatchEvent]:
        """Return the opening event of each watch that is open."""
        newest = "SELECT max(number) FROM events GROUP BY camera, watch"
        statement = f"SELECT {COLUMNS} FROM events WHERE state = 'open' AND number IN ({newest})"
        return [_event(*row) for row in self._rows(statement)]

    def openings(self, since: float, until: float, camera: str | None = None, search: str | None = None) -> list[Opening]:
        """Return the periods in which watches were open, oldest first.

        Includes watches that were already open at ``since``. ``search``: words that must all occur in the camera's, the watch's
        or the question's text.
        """
        newest = "SELECT max(number) FROM events WHERE time < ? AND camera = coalesce(?, camera) GROUP BY camera, watch"
        statement = f"SELECT {COLUMNS} FROM events WHERE state = 'open' AND number IN ({newest}) ORDER BY number"
        open_then = [_event(*row) for row in self._rows(statement, since, camera)]
        found: dict[tuple[str, str, float], Opening] = {}
        for event in [*open_then, *self.query(since, until, camera, limit=MOST)[::-1]]:
            key, opening = (event.camera, event.watch, event.opened), Opening(event)
            found[key] = replace(found.get(key, opening), closed=event.time) if event.state == "close" else opening
        words = (search or "").lower().split()
        shown = [each for each in found.values() if all(word in each.event.names for word in words)]
        return sorted(shown, key=lambda opening: opening.event.opened)

    def picture(self, event_id: str, place: int) -> bytes | None:
        """Return the JPEG of a moment in an event's evidence, or None. ``place``: the moment's index in the evidence."""
        statement = "SELECT jpeg FROM pictures JOIN events ON number = event WHERE id = ? AND place = ?"
        rows = self._rows(statement, event_id, place)
        return rows[0][0] if rows else None

    def delete(self, camera: str | None = None, since: float = -math.inf, until: float = math.inf) -> int:
        with self._lock:
            gone = [key for key, each in self._unwritten.items() if each.event.is_of(camera, since, until)]
            for key in gone:
                del self._unwritten[key]
            return len(gone) + super().delete(camera, since, until)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._write()
            if self._unwritten:
                self._try_notify(f"{len(self._unwritten)} events are lost: they could not be written to disk")
            super().close()

    def _flush(self) -> None:
        self._run("PRAGMA wal_checkpoint(TRUNCATE)")

    def _write(self) -> None:
        for key, entry in list(self._unwritten.items()):
            if not self._attempt(partial(self._insert, entry), False):
                break
            del self._unwritten[key]
        if self._sent:
            self._attempt(self._delete_sent, None)
        if not (self._unwritten or self._sent):
            self._works_again()

    def _insert(self, entry: Unwritten) -> bool:
        event = entry.event
        values = [getattr(event, name) for name in COLUMNS.split(", ")[:6]]
        with self._transaction():
            statement = f"INSERT OR IGNORE INTO events (id, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING number"
            for (number,) in self._run(statement, event.id, *values, json.dumps(event.evidence), event.question):
                for place, jpeg in enumerate(entry.pictures):
                    if jpeg:
                        self._run("INSERT INTO pictures VALUES (?, ?, ?)", number, place, jpeg)
                for sink in entry.sinks:
                    self._run("INSERT INTO outbox VALUES (?, ?)", sink, number)
        self._attempt(self.prune, None)
        return True

    def _delete_sent(self) -> None:
        with self._transaction():
            for each in self._sent:
                self._run("DELETE FROM outbox WHERE sink = ? AND event = (SELECT number FROM events WHERE id = ?)", *each)
        self._sent.clear()


def _event(*row: Any) -> WatchEvent:
    return WatchEvent(**{**dict(zip(COLUMNS.split(", "), row, strict=True)), "evidence": json.loads(row[6])})
