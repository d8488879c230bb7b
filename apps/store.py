"""Store what cameras saw in SQLite files, one per kind of data, with rules for keeping and deleting rows."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import LOCK_UN
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

from edgevlm.errors import UserError
from edgevlm.progress import Lost, Notify
from edgevlm.runtime.files import PRIVATE, lock_file, private_folder
from edgevlm.runtime.instant import Instant

T = TypeVar("T")
Rows = list[tuple[Any, ...]]
VERSION = 1  # schema version of the database
DAY_S = 86_400.0
CLOCK = """
CREATE TABLE IF NOT EXISTS days (day INTEGER PRIMARY KEY, last INTEGER, passed REAL, boot TEXT, boot_s REAL, wall REAL);
"""  # for each elapsed day, the number of its last row and the readings of the clocks

NO_LOCKS = "?vfs=unix-none"  # for disks without file locks, where SQLite cannot map WAL's index into memory
WAL = "journal_mode = WAL"


class TimedDatabase:
    """A table of rows with times, in a separate SQLite file in ``folder``, or in memory if ``folder`` is None.

    Any thread may call any method. A damaged file is renamed, and a new file is started. ``notify`` gets one line when the disk
    refuses writes, and another once writes succeed again. Rows are deleted after ``days`` days of elapsed time; setting the
    clock deletes nothing. While the file is larger than ``cap`` bytes, the statements in :attr:`SPARE` delete rows. Raises
    UserError if the file cannot be opened or another process uses it.
    """

    FILE: ClassVar[str]
    TABLES: ClassVar[str]  # the SQL that creates the tables
    TABLE: ClassVar[str]
    DAYS: ClassVar[float] = math.inf
    CAP: ClassVar[int]
    MEANWHILE: ClassVar[str]
    TIMES: ClassVar[tuple[str, ...]] = ("time",)  # columns with times; a row is in a period if any of its times is in it
    HAS_CAMERA: ClassVar[bool] = True
    MAY_GO: ClassVar[str] = "1"  # SQL condition that an expired row must meet to be deleted
    SPARE: ClassVar[tuple[str, ...]]
    PRAGMAS: ClassVar[tuple[str, ...]] = ("secure_delete = ON",)  # overwrite deleted rows

    def __init__(
        self,
        folder: Path | None = None,
        notify: Notify = lambda line: None,
        *,
        days: float | None = None,
        cap: int | None = None,
    ) -> None:
        self.path = None if folder is None else folder / self.FILE
        self.forgotten = 0  # number of calls of delete
        self._has_locks = True
        self._notify, self._days, self._cap = notify, self.DAYS if days is None else days, self.CAP if cap is None else cap
        self._lock, self._failing, self._closed = threading.RLock(), False, False
        self._database: sqlite3.Connection | None = None
        self._held: BinaryIO = BytesIO()  # locked while open, so that no other process uses the database
        try:
            if folder is not None:
                private_folder(folder)
            self._mended(self._open)
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, BlockingIOError):
                raise UserError(f"{folder}: in use by another process; stop it or choose another --state") from None
            raise UserError(f"{self.path}: cannot be written ({error}); choose another --state") from None

    def delete(self, camera: str | None = None, since: float = -math.inf, until: float = math.inf) -> int:
        """Erase the rows of a period, including both ends, and return their number. Raises UserError."""
        of_time = " OR ".join(f"{column} BETWEEN ? AND ?" for column in self.TIMES)
        of_camera = "camera = coalesce(?, camera)" if self.HAS_CAMERA else "? IS NULL"
        values = (*(since, until) * len(self.TIMES), camera)
        with self._lock:
            self.forgotten += 1
            for path in () if self.path is None else self.path.parent.glob(f"{self._damaged.name}*"):
                path.unlink(missing_ok=True)
            try:
                deleted = self._open().execute(f"DELETE FROM {self.TABLE} WHERE ({of_time}) AND {of_camera}", values)
                self._run(f"UPDATE days SET last = min(last, {self._newest})")  # new rows may get the deleted rows' numbers
                self._purge()
                self._flush()
            except sqlite3.Error as error:
                self._roll_back()
                raise UserError(f"{self.path}: {self.TABLE} cannot be deleted ({error})") from None
            return deleted.rowcount

    def prune(self) -> None:
        """Delete rows that are too old, day by day, then more rows until the file is small enough."""
        now, found = Instant.now(), self._run("SELECT passed, boot, boot_s, wall FROM days ORDER BY day DESC LIMIT 1")
        passed = found[0][0] + now.since(Instant(*found[0][1:]), DAY_S) if found else 0.0
        self._run(f"INSERT OR REPLACE INTO days VALUES (?, {self._newest}, ?, ?, ?, ?)", passed // DAY_S, passed, *now)
        old = self._run("SELECT day, last FROM days WHERE passed < ? ORDER BY day DESC LIMIT 1", passed - DAY_S * self._days)
        for day, last in old:
            if self._open().execute(f"DELETE FROM {self.TABLE} WHERE rowid <= ? AND {self.MAY_GO}", (last,)).rowcount:
                self._purge()
            self._run("DELETE FROM days WHERE day < ?", day)
        for statement in self.SPARE:
            while self._used() > self._cap and self._open().execute(statement).rowcount > 0:
                self._purge()

    def close(self) -> None:
        """Close the file. Closing the file again does nothing."""
        with self._lock:
            self._closed = True
            if self._database is not None:
                self._database.close()
            if self.path is not None and not self._held.closed:
                lock_file(self._held, LOCK_UN)  # unlock explicitly, because a forked process may hold the file open
            self._held.close()

    def _find(self, columns: str, where: Mapping[str, Any], order: str, limit: int) -> Rows:
        """Return the rows that meet the conditions in ``where``; a condition whose value is None is ignored."""
        given = {condition: value for condition, value in where.items() if value is not None}
        statement = f"SELECT {columns} FROM {self.TABLE} WHERE {' AND '.join(given) or '1'} ORDER BY {order} LIMIT ?"
        return self._rows(statement, *given.values(), limit)

    def _purge(self) -> None:
        """Erase leftovers of deleted rows from the table."""

    def _flush(self) -> None:
        """Write changes to the disk."""

    def _used(self) -> int:
        pages, free, size = (self._run(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    @property
    def _newest(self) -> str:
        """Return an SQL expression for the number of the newest row."""
        return f"coalesce((SELECT rowid FROM {self.TABLE} ORDER BY rowid DESC LIMIT 1), 0)"

    @property
    def _damaged(self) -> Path:
        return Path(self.path or "").with_suffix(".damaged.sqlite")

    def _open(self) -> sqlite3.Connection:
        if self._database is not None:
            return self._database
        if self.path is not None:  # SQLite gives its journal files the permissions of the database file
            self._held.close()
            self._held = open(self.path, "rb", opener=lambda path, _: os.open(path, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600))  # noqa: SIM115
            self._has_locks = lock_file(self._held)
        where = ":memory:" if self.path is None else f"{self.path.absolute().as_uri()}{'' if self._has_locks else NO_LOCKS}"
        database = sqlite3.connect(where, timeout=2.0, isolation_level=None, check_same_thread=False, uri=True)
        try:
            exclusive = () if self._has_locks else ("locking_mode = EXCLUSIVE", "journal_mode = DELETE")
            for pragma in (*exclusive, *(each for each in self.PRAGMAS if self._has_locks or each != WAL)):
                database.execute(f"PRAGMA {pragma}")
            ((state,),) = database.execute("PRAGMA quick_check(1)").fetchall()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            ((version,),) = database.execute("PRAGMA user_version").fetchall()
            if version > VERSION:
                raise UserError(f"{self.path}: was written by a newer edgevlm; upgrade edgevlm or choose another --state")
            database.executescript(f"BEGIN; {self.TABLES} {CLOCK} PRAGMA user_version = {VERSION}; COMMIT;")
        except BaseException:
            database.close()
            raise
        self._database = database
        return database

    def _mended(self, work: Callable[[], T]) -> T:
        """Call ``work`` and return its result. If the file is damaged, rename the file and call ``work`` with a new one."""
        for again in (True, False):  # a single error does not prove damage
            try:
                return work()
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError or self.path is None:  # only the base class means damage
                    raise
                if self._database is not None:
                    self._database.close()
                self._database, damage = None, error
            if again:
                continue
            for name in ("", "-wal", "-shm", "-journal"):
                with suppress(FileNotFoundError):
                    os.replace(f"{self.path}{name}", f"{self._damaged}{name}")
            self._try_notify(f"{self.path}: is damaged ({damage}); renamed to {self._damaged.name}, and started a new file")
        return work()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        database = self._open()
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
            database.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._database is not None and self._database.in_transaction:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    def _run(self, statement: str, *values: Any) -> Rows:
        return self._open().execute(statement, values).fetchall()

    def _rows(self, statement: str, *values: Any) -> Rows:
        """Return the rows of a query, or none if the file cannot be read."""
        none: Rows = []
        with self._lock:
            return self._attempt(lambda: self._run(statement, *values), none)

    def _attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """Call ``work`` and return its result. If the disk or the file fails, report the error and return ``otherwise``."""
        if self._closed:
            return otherwise
        try:
            return self._mended(work)
        except (sqlite3.Error, OSError, UserError) as error:
            self._roll_back()
            if not self._failing:
                self._try_notify(f"{self.path}: cannot be written ({error}); {self.MEANWHILE}")
            self._failing = True
            return otherwise

    def _works_again(self) -> None:
        if self._failing:
            self._failing = False
            self._try_notify(f"writing {self.TABLE} resumed")

    def _try_notify(self, line: str) -> None:
        with suppress(OSError):
            self._notify(Lost(line))
