"""Events of watches: an SQLite file of what happened, with an outbox of what is still to be sent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from edgevlm.apps.run.events import wall_clock
from edgevlm.apps.schemas import SCHEMA
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.files import PRIVATE, private_folder

T = TypeVar("T")
Rows = list[tuple[Any, ...]]
FILE, LOCK, DAMAGED = "events.sqlite", "events.lock", "events.damaged.sqlite"
VERSION = 1  # of the tables
DAYS = 30.0  # that events are kept
CAP = 64 << 20  # bytes of the file in use
UNWRITTEN = 1000  # events held in memory while the disk takes none
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
COLUMNS = "camera, watch, state, time, probability, opened, evidence, question"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A watch that opened or closed.

    time, opened: seconds since 1970, of this event and of the opening that it is or ends. evidence: moments, as an answer's
    JSON has them. question: for people; it is not in the event's JSON.
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
        """32 hexadecimal digits, the same for the same camera, watch, opening (to the millisecond) and state."""
        return hashlib.sha256(json.dumps([self.camera, self.watch, round(1e3 * self.opened), self.state]).encode()).hexdigest()[
            :32
        ]

    def json(self) -> dict[str, Any]:
        """What every sink and ``/v1/events`` tell of it."""
        return {
            "event": "watch", "schema": SCHEMA, "id": self.id, "watch": self.watch, "camera": self.camera, "state": self.state,
            "time": wall_clock(self.time), "probability": round(self.probability, 4), "evidence": list(self.evidence),
        }  # fmt: skip

    def line(self) -> str:
        """Its JSON, one line in ASCII."""
        return json.dumps(self.json())


def picture_url(event_id: str, place: int) -> str:
    """Where the server shows the picture of an event's evidence at that place."""
    return f"/v1/events/{event_id}/{place}.jpg"


@dataclass
class Unwritten:
    """An event that the disk has not taken yet. sinks: those that it is still to be sent to."""

    event: WatchEvent
    pictures: Sequence[bytes | None]
    sinks: set[str] = field(default_factory=set)


class EventStore:
    """What happened, and what is still to be sent, in a folder that this process alone writes to. Any thread may call it.

    :meth:`record` returns once the event is on the disk. Where the disk takes none, events are held in memory, UNWRITTEN at
    most, and sent from there; ``notify`` is told in one line, and when it works again. A damaged file is moved to DAMAGED.

    days: that events are kept; those still to be sent stay. cap: bytes of the file; above it pictures go first, then events,
    oldest first. Raises UserError for a folder that cannot be written.
    """

    def __init__(self, folder: str | Path, notify: Notify = lambda line: None, *, days: float = DAYS, cap: int = CAP) -> None:
        self._folder, self._notify, self._days, self._cap = Path(folder), notify, days, cap
        self._path = self._folder / FILE
        self._lock, self._failing = threading.RLock(), False
        self._unwritten: deque[Unwritten] = deque()
        self._sent: set[tuple[str, str]] = set()  # sink and id of what was sent while the disk did not take it
        self._database: sqlite3.Connection | None = None
        self._closed, self._locked = False, self._exclusive()
        try:
            self._mended(self._open)
        except (sqlite3.Error, OSError) as error:
            os.close(self._locked)
            raise UserError(f"{self._path}: cannot be written ({error}); choose another --state") from None
        except UserError:
            os.close(self._locked)
            raise
        self._attempt(self._shrink, None)

    def record(self, event: WatchEvent, pictures: Sequence[bytes | None] = (), sinks: Iterable[str] = ()) -> None:
        """Write an event and what is to be sent, in one transaction; one whose id is known changes nothing.

        pictures: a JPEG, or None, for each moment of its evidence, whose ``jpeg_url`` names it then.
        """
        evidence = [
            {**moment, "jpeg_url": picture_url(event.id, place) if place < len(pictures) and pictures[place] else None}
            for place, moment in enumerate(event.evidence)
        ]
        with self._lock:
            if all(each.event.id != event.id for each in self._unwritten):
                self._unwritten.append(Unwritten(replace(event, evidence=evidence), pictures, set(sinks)))
            self._write()
            while len(self._unwritten) > UNWRITTEN:
                self._unwritten.popleft()

    def next(self, sink: str) -> tuple[WatchEvent, list[bytes]] | None:
        """The oldest event that is still to be sent to a sink, and its pictures; None where there is none."""
        with self._lock:
            self._write()
            found = self._attempt(lambda: self._oldest(sink), None)
            if found is None:
                for each in self._unwritten:
                    if sink in each.sinks:
                        return each.event, [picture for picture in each.pictures if picture]
            return found

    def sent(self, sink: str, event_id: str) -> None:
        """An event needs not be sent to a sink any more."""
        with self._lock:
            for each in self._unwritten:
                if each.event.id == event_id:
                    each.sinks.discard(sink)
            self._sent.add((sink, event_id))
            self._write()

    def waiting(self) -> dict[str, int]:
        """How many events are still to be sent, by sink."""
        with self._lock:
            rows = self._rows("SELECT sink, count(*) FROM outbox GROUP BY sink")
            return Counter(dict(rows)) + Counter(sink for each in self._unwritten for sink in each.sinks)

    def unsent(self) -> set[str]:
        """Ids of the events that are still to be sent."""
        with self._lock:
            rows = self._rows("SELECT DISTINCT id FROM events JOIN outbox ON event = number")
            return {row[0] for row in rows} | {each.event.id for each in self._unwritten if each.sinks}

    def drop(self, sink: str) -> None:
        """Nothing is to be sent to a sink any more."""
        with self._lock:
            for each in self._unwritten:
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
        """Events, newest first. since, until: seconds since 1970, both included. text: part of camera, watch or question."""
        where: dict[str, Any] = {"time >= ?": since, "time <= ?": until, "camera = ?": camera, "watch = ?": watch}
        if text:
            where["instr(lower(camera || char(10) || watch || char(10) || question), lower(?))"] = text
        given = {condition: value for condition, value in where.items() if value is not None}
        conditions = " AND ".join(given) or "1"
        statement = f"SELECT {COLUMNS} FROM events WHERE {conditions} ORDER BY time DESC, number DESC LIMIT ?"
        with self._lock:
            rows = self._rows(statement, *given.values(), limit)
        return [_event(*row) for row in rows]

    def last(self, camera: str, watch: str) -> WatchEvent | None:
        """The event of a watch that was recorded last, whatever the clock said."""
        statement = f"SELECT {COLUMNS} FROM events WHERE camera = ? AND watch = ? ORDER BY number DESC LIMIT 1"
        with self._lock:
            held = [each.event for each in self._unwritten if (each.event.camera, each.event.watch) == (camera, watch)]
            rows = self._rows(statement, camera, watch)
        return held[-1] if held else _event(*rows[0]) if rows else None

    def open_at(self, time: float, camera: str | None = None) -> list[WatchEvent]:
        """The openings, by camera and watch, that no closing had followed before this time."""
        newest = "SELECT max(number) FROM events WHERE time < ? AND camera = coalesce(?, camera) GROUP BY camera, watch"
        statement = f"SELECT {COLUMNS} FROM events WHERE state = 'open' AND number IN ({newest}) ORDER BY number"
        with self._lock:
            rows = self._rows(statement, time, camera)
        return [_event(*row) for row in rows]

    def picture(self, event_id: str, place: int) -> bytes | None:
        """The JPEG of an event's evidence at that place."""
        statement = "SELECT jpeg FROM pictures JOIN events ON number = event WHERE id = ? AND place = ?"
        with self._lock:
            rows = self._rows(statement, event_id, place)
        return rows[0][0] if rows else None

    def forget(self, since: float | None = None, until: float | None = None, camera: str | None = None) -> int:
        """Delete events of a time, and closings of what opened then, sent or not, and overwrite their bytes; returns how many.

        Raises UserError.
        """
        where = "(time BETWEEN ? AND ? OR opened BETWEEN ? AND ?) AND camera = coalesce(?, camera)"
        span = (-1e300 if since is None else since, 1e300 if until is None else until)
        with self._lock:
            gone = [
                each for each in self._unwritten
                if any(span[0] <= at <= span[1] for at in (each.event.time, each.event.opened))
                and camera in (None, each.event.camera)
            ]  # fmt: skip
            for each in gone:
                self._unwritten.remove(each)
            for path in self._folder.glob(f"{DAMAGED}*"):
                path.unlink(missing_ok=True)
            try:
                count = len(gone) + len(self._all(f"DELETE FROM events WHERE {where} RETURNING number", *span, *span, camera))
                self._all("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise UserError(f"{self._path}: events cannot be deleted ({error})") from None
        return count

    def close(self) -> None:
        """Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._write()
            if self._unwritten:
                self._try_notify(f"{len(self._unwritten)} events are lost: the disk does not take them")
            self._closed = True
            if self._database is not None:
                self._database.close()
            os.close(self._locked)

    def _exclusive(self) -> int:
        try:
            private_folder(self._folder)
            lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written ({error.strerror}); choose another --state") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise UserError(f"{self._folder}: another process uses it; end that one, or choose another --state") from None
        return lock

    def _open(self) -> sqlite3.Connection:
        """The database; opened where it is not."""
        if self._database is not None:
            return self._database
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600))  # its journal gets the same mode
        database = sqlite3.connect(self._path, timeout=2.0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
                database.execute(f"PRAGMA {pragma}")
            for _ in range(2):  # a page that could not be read once is not damage
                ((state,),) = database.execute("PRAGMA quick_check(1)").fetchall()
                if state == "ok":
                    break
            else:
                raise sqlite3.DatabaseError(state)
            ((version,),) = database.execute("PRAGMA user_version").fetchall()
            if version > VERSION:
                raise UserError(f"{self._path}: was written by a newer edgevlm; install that one, or choose another --state")
            database.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        except BaseException:
            database.close()
            raise
        self._database = database
        return database

    def _mended(self, work: Callable[[], T]) -> T:
        """What the work returns; a damaged file is set aside, and the work done in a new one."""
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # of its subclasses none is damage
                raise
            if self._database is not None:
                self._database.close()
            self._database = None
            for name in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.replace(f"{self._path}{name}", f"{self._folder / DAMAGED}{name}")
            self._try_notify(f"{self._path}: is damaged ({error}); it is now {DAMAGED}, and events are begun anew")
            return work()

    def _write(self) -> None:
        """Bring to the disk what it has not taken yet."""
        while self._unwritten:
            if not self._attempt(lambda: self._insert(self._unwritten[0]), False):
                break
            self._unwritten.popleft()
        if self._sent:
            self._attempt(self._delete_sent, None)
        if self._failing and not (self._unwritten or self._sent):
            self._failing = False
            self._try_notify("events are written again")

    def _insert(self, entry: Unwritten) -> bool:
        event = entry.event
        values = [getattr(event, name) for name in COLUMNS.split(", ")[:6]]
        with self._transaction():
            statement = f"INSERT OR IGNORE INTO events (id, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING number"
            for (number,) in self._all(statement, event.id, *values, json.dumps(event.evidence), event.question):
                for place, jpeg in enumerate(entry.pictures):
                    if jpeg:
                        self._all("INSERT INTO pictures VALUES (?, ?, ?)", number, place, jpeg)
                for sink in entry.sinks:
                    self._all("INSERT INTO outbox VALUES (?, ?)", sink, number)
        self._attempt(self._shrink, None)
        return True

    def _delete_sent(self) -> None:
        this = "event = (SELECT number FROM events WHERE id = ?)"
        with self._transaction():
            for each in self._sent:
                self._all(f"DELETE FROM outbox WHERE sink = ? AND {this}", *each)
        self._sent.clear()

    def _oldest(self, sink: str) -> tuple[WatchEvent, list[bytes]] | None:
        statement = f"SELECT number, id, {COLUMNS} FROM outbox JOIN events ON event = number WHERE sink = ? ORDER BY number"
        for number, event_id, *row in self._open().execute(statement, (sink,)):
            if (sink, event_id) not in self._sent:
                pictures = self._all("SELECT jpeg FROM pictures WHERE event = ? ORDER BY place", number)
                return _event(*row), [jpeg for (jpeg,) in pictures]
        return None

    def _shrink(self) -> None:
        """Delete what is too old, and, a tenth at a time, what is too much."""
        tenth, sent = "LIMIT (SELECT 1 + count(*) / 10 FROM events)", "number NOT IN (SELECT event FROM outbox)"
        self._all(f"DELETE FROM events WHERE time < ? AND {sent}", time.time() - 86_400 * self._days)
        for table, key, chosen in (
            ("pictures", "event", f"SELECT DISTINCT event FROM pictures ORDER BY event {tenth}"),
            ("events", "number", f"SELECT number FROM events WHERE {sent} ORDER BY number {tenth}"),
            ("events", "number", f"SELECT number FROM events ORDER BY number {tenth}"),
        ):
            statement = f"DELETE FROM {table} WHERE {key} IN ({chosen}) RETURNING 1"
            while self._used() > self._cap and self._all(statement):
                pass

    def _used(self) -> int:
        values = [self._all(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size")]
        return (values[0] - values[1]) * values[2]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        database = self._open()
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
            database.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

    def _all(self, statement: str, *values: Any) -> Rows:
        return self._open().execute(statement, values).fetchall()

    def _rows(self, statement: str, *values: Any) -> Rows:
        """Rows; none where the file cannot be read."""
        none: Rows = []
        return self._attempt(lambda: self._all(statement, *values), none)

    def _attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """What the work returns, or ``otherwise``, with a notice, where disk or file do not let it be done."""
        if self._closed:
            return otherwise
        try:
            return self._mended(work)
        except (sqlite3.Error, OSError, UserError) as error:
            if not self._failing:
                self._try_notify(f"{self._path}: cannot be written ({error}); events are held in memory and sent from there")
            self._failing = True
            return otherwise

    def _try_notify(self, line: str) -> None:
        with suppress(OSError):
            self._notify(line)


def _event(*row: Any) -> WatchEvent:
    camera, watch, state, when, probability, opened, evidence, question = row
    return WatchEvent(camera, watch, state, when, probability, opened, json.loads(evidence), question)
