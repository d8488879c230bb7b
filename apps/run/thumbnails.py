"""Small pictures of watched frames, for people: a ring under a cap of bytes, in a file where there is a state folder."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.opencv import decode_picture
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.files import PRIVATE

FILE = "thumbnails.sqlite"
CAP = 16 << 20  # bytes of pictures
WIDTH = 240  # pixels
TINY = 160
SCHEMA = """
CREATE TABLE IF NOT EXISTS thumbnails (frame INTEGER PRIMARY KEY, time_s REAL, wall REAL, held INTEGER, jpeg BLOB);
CREATE INDEX IF NOT EXISTS held ON thumbnails (frame) WHERE held;
CREATE INDEX IF NOT EXISTS wall ON thumbnails (wall);
"""  # each frame looks for what is forgotten and what is too old: without an index it would read every picture


@dataclass(frozen=True, slots=True)
class Taken:
    """When a frame was taken. time_s: of the stream; wall: seconds since 1970; held: memory had some of it at the last look."""

    time_s: float
    wall: float
    held: bool


class Thumbnails:
    """JPEGs by frame number, for so many ``days``.

    Beyond ``cap`` bytes those of forgotten frames go first, oldest first, then every second one.

    folder: where they outlive the process, in :data:`FILE`; a file that cannot be read is begun anew.
    every: seconds from one write to the disk to the next; a crash loses what came since. notify: is told in one
    line when they cannot be kept there. Any thread may call any method; none raises for what the disk does.
    """

    def __init__(
        self,
        folder: Path | None = None,
        notify: Notify = lambda line: None,
        *,
        every: float = 30.0,
        cap: int = CAP,
        days: float = math.inf,
    ) -> None:
        self._days, self._cap, self._every, self._notify = days, cap, every, notify
        self._failing = self._told = False  # since the last commit; and since it last worked
        self._lock, self._written, self._bytes = threading.Lock(), time.monotonic(), 0
        try:
            self._open(None if folder is None else folder / FILE)
        except (sqlite3.Error, OSError) as error:
            assert folder is not None
            with suppress(OSError):
                (folder / FILE).unlink(missing_ok=True)
            try:
                self._open(folder / FILE)
                self._try_notify(f"{folder / FILE}: cannot be read ({error}); its pictures are begun anew")
            except (sqlite3.Error, OSError) as again:
                self._try_notify(f"{folder / FILE}: cannot be used ({again}); a restart shows no pictures of before")
                self._open(None)

    def add(self, frame: int, time_s: float, wall: float, image: NDArray[np.uint8]) -> None:
        """Keep a frame, uint8 RGB ``[H, W, 3]``."""
        jpeg = as_jpeg(shrunk(image, WIDTH))
        with self._lock:
            self._run("INSERT OR REPLACE INTO thumbnails VALUES (?, ?, ?, 1, ?)", (frame, time_s, wall, jpeg))
            self._bytes += len(jpeg)

    def keep(self, held: set[int], newest: int) -> None:
        """Note which frames up to ``newest`` are held, keep to the cap, and write to the disk where it is time to."""
        with self._lock:
            rows = self._run("SELECT frame FROM thumbnails WHERE held AND frame <= ?", (newest,))
            for (frame,) in rows:
                if frame not in held:
                    self._run("UPDATE thumbnails SET held = 0 WHERE frame = ?", (frame,))
            if self._bytes > self._cap:
                self._shrink()
            if self._days < math.inf:
                self._run("DELETE FROM thumbnails WHERE wall < ?", (time.time() - 86_400 * self._days,))
            if time.monotonic() - self._written > self._every:
                self._commit()

    def begin(self, frame: int) -> None:
        """The stream goes on with this frame number: pictures from there on are of frames that are not known."""
        with self._lock:
            self._run("DELETE FROM thumbnails WHERE frame >= ?", (frame,))

    def forget(self, since: float, until: float) -> int:
        """Delete the pictures taken from ``since`` to ``until``, seconds since 1970, also from the disk; returns how many.

        Raises UserError where the disk does not take it.
        """
        with self._lock:
            span = (since, until)
            count = len(self._run("SELECT frame FROM thumbnails WHERE wall >= ? AND wall <= ?", span))
            self._run("DELETE FROM thumbnails WHERE wall >= ? AND wall <= ?", span)
            self._commit()
            left = self._run("SELECT 1 FROM thumbnails WHERE wall >= ? AND wall <= ? LIMIT 1", span)
            self._bytes = (self._run("SELECT coalesce(sum(length(jpeg)), 0) FROM thumbnails") or [(0,)])[0][0]
        if left or self._failing:
            raise UserError("the thumbnails of that time could not be deleted: the disk does not take it")
        return count

    def taken(self, frames: Sequence[int] | None = None) -> dict[int, Taken]:
        """Of each frame that has a picture, or of those of ``frames``, when it was taken; oldest first."""
        only = "" if frames is None else "WHERE frame IN (SELECT value FROM json_each(?))"
        with self._lock:
            values = () if frames is None else (json.dumps(frames),)
            rows = self._run(f"SELECT frame, time_s, wall, held FROM thumbnails {only} ORDER BY frame", values)
        return {frame: Taken(time_s, wall, bool(held)) for frame, time_s, wall, held in rows}

    def wall(self, frame: int) -> float | None:
        """When a frame that has a picture was taken, seconds since 1970."""
        with self._lock:
            found = self._run("SELECT wall FROM thumbnails WHERE frame = ?", (frame,))
        return found[0][0] if found else None

    def jpeg(self, frame: int) -> bytes | None:
        with self._lock:
            found = self._run("SELECT jpeg FROM thumbnails WHERE frame = ?", (frame,))
        return found[0][0] if found else None

    def image(self, frame: int) -> NDArray[np.uint8] | None:
        """Pixels, uint8 RGB ``[H, W, 3]``."""
        return None if (jpeg := self.jpeg(frame)) is None else decode_picture(jpeg)

    def close(self) -> None:
        """Write what is not on the disk yet. Closing again does nothing."""
        with self._lock, suppress(sqlite3.ProgrammingError):  # it is closed
            self._commit()
            self._database.close()

    def _open(self, path: Path | None) -> None:
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600))
        self._database = sqlite3.connect(
            ":memory:" if path is None else path, timeout=1.0, isolation_level=None, check_same_thread=False
        )
        try:
            self._database.execute("PRAGMA secure_delete = ON")  # what is forgotten leaves no bytes in the file
            self._database.executescript(SCHEMA)
            self._bytes = self._database.execute("SELECT coalesce(sum(length(jpeg)), 0) FROM thumbnails").fetchone()[0]
            self._database.execute("BEGIN")
        except BaseException:
            self._database.close()
            raise

    def _shrink(self) -> None:
        """Down to nine tenths of the cap, so that it is not done for each frame."""
        ((self._bytes,),) = self._run("SELECT coalesce(sum(length(jpeg)), 0) FROM thumbnails") or [(0,)]
        for held in (False, True):
            while self._bytes > self._cap * 9 // 10:
                query = "SELECT frame, length(jpeg) FROM thumbnails WHERE held = ? ORDER BY frame"
                found = self._run(query, (int(held),))
                if len(found) < 1 + held:  # of what is held, the newest stays
                    break
                for frame, size in found[:-1:2] if held else found[: 1 + len(found) // 4]:
                    self._run("DELETE FROM thumbnails WHERE frame = ?", (frame,))
                    self._bytes -= size

    def _commit(self) -> None:
        self._written = time.monotonic()
        if self._database.in_transaction:
            self._run("COMMIT")
        self._told, self._failing = self._told and self._failing, False
        self._run("BEGIN")

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows; none, and a notice, where the disk is full or the file is broken."""
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.ProgrammingError:  # it is closed
            return []
        except sqlite3.Error as error:
            if self._database.in_transaction:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
            if not self._told:
                self._try_notify(f"thumbnails are not written ({error}); the stream goes on")
            self._failing = self._told = True
            return []

    def _try_notify(self, line: str) -> None:
        with suppress(OSError):
            self._notify(line)


def shrunk(image: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """A picture, uint8 ``[H, W, 3]``, ``most`` pixels wide at the most."""
    import cv2

    width = min(most, image.shape[1])
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def as_jpeg(image: NDArray[np.uint8]) -> bytes:
    """A JPEG of uint8 RGB ``[H, W, 3]``; of a tiny one with all its colours, which are shown many pixels large."""
    import cv2

    settings = [cv2.IMWRITE_JPEG_QUALITY, 80]
    if image.shape[1] < TINY:
        settings = [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
    return bytes(cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), settings)[1])
