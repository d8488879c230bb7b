"""Keep thumbnails of watched frames, up to a total size, in memory or in a file of the state folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.store import TimedDatabase
from edgevlm.progress import Notify

WIDTH = 240  # width in pixels
TINY = 160


@dataclass(frozen=True, slots=True)
class Taken:
    """The stream time and the wall-clock time (seconds since 1970) at which a frame was taken.

    ``held``: whether the memory held any of the frame's tokens at the last check.
    """

    time_s: float
    wall: float
    held: bool


class Thumbnails(TimedDatabase):
    """JPEG thumbnails by frame number. Only :meth:`delete` raises disk errors.

    When space runs out, thumbnails of evicted frames are deleted first, then every second remaining one. Thumbnails are written
    to the disk every ``every`` seconds, so a crash loses the newest thumbnails.
    """

    FILE, TABLE, TIMES, HAS_CAMERA, CAP = "thumbnails.sqlite", "thumbnails", ("wall",), False, 16 << 20
    MEANWHILE = "the stream continues"
    TABLES = """
    CREATE TABLE IF NOT EXISTS thumbnails (frame INTEGER PRIMARY KEY, time_s REAL, wall REAL, held INTEGER, jpeg BLOB);
    CREATE INDEX IF NOT EXISTS held ON thumbnails (frame) WHERE held;
    CREATE INDEX IF NOT EXISTS wall ON thumbnails (wall);
    """  # the indices let SQLite find evicted and old pictures without reading every picture
    SPARE = (
        "DELETE FROM thumbnails WHERE frame IN (SELECT frame FROM thumbnails WHERE NOT held ORDER BY frame "
        "LIMIT 1 + (SELECT count(*) FROM thumbnails WHERE NOT held) / 4)",
        "DELETE FROM thumbnails WHERE frame IN (SELECT frame FROM (SELECT frame, row_number() OVER (ORDER BY frame) AS place "
        "FROM thumbnails WHERE held) WHERE place % 2 AND frame < (SELECT max(frame) FROM thumbnails))",
    )

    def __init__(self, folder: Path | None = None, *given: Notify, every: float = 30.0, **kept: Any) -> None:
        self._every, self._written, self._added = every, time.monotonic(), False
        super().__init__(folder, *given, **kept)

    def add(self, frame: int, time_s: float, wall: float, image: NDArray[np.uint8]) -> None:
        """Store a thumbnail of a frame, uint8 RGB ``[H, W, 3]``."""
        values = (frame, time_s, wall, as_jpeg(shrunk(image, WIDTH)))
        with self._lock:
            self._added = self._change("INSERT OR REPLACE INTO thumbnails VALUES (?, ?, ?, 1, ?)", *values) or self._added

    def keep(self, held: set[int], newest: int) -> None:
        """Record which frames up to number ``newest`` are in memory, then delete thumbnails that are too old or too many."""
        with self._lock:
            for (frame,) in self._rows("SELECT frame FROM thumbnails WHERE held AND frame <= ?", newest):
                if frame not in held:
                    self._change("UPDATE thumbnails SET held = 0 WHERE frame = ?", frame)
            self._attempt(self.prune, None)
            if time.monotonic() - self._written > self._every:
                self._attempt(self._flush, None)

    def begin(self, frame: int) -> None:
        """Delete the thumbnails of ``frame`` and later frames, which are not in the resumed memory."""
        self._change("DELETE FROM thumbnails WHERE frame >= ?", frame)
        self._change(f"UPDATE days SET last = min(last, {self._newest})")

    def taken(self, frames: Sequence[int] | None = None) -> dict[int, Taken]:
        """Return the times at which frames were taken, oldest first; by default, the times of all frames with a thumbnail."""
        only = "" if frames is None else "WHERE frame IN (SELECT value FROM json_each(?))"
        values = () if frames is None else (json.dumps(frames),)
        rows = self._rows(f"SELECT frame, time_s, wall, held FROM thumbnails {only} ORDER BY frame", *values)
        return {frame: Taken(time_s, wall, bool(held)) for frame, time_s, wall, held in rows}

    def jpeg(self, frame: int) -> bytes | None:
        found = self._rows("SELECT jpeg FROM thumbnails WHERE frame = ?", frame)
        return found[0][0] if found else None

    def close(self) -> None:
        with self._lock:
            self._attempt(self._flush, None)
            super().close()

    def _change(self, statement: str, *values: object) -> bool:
        """Run a statement in the open transaction; return whether it succeeded."""

        def work() -> bool:
            if not self._open().in_transaction:
                self._run("BEGIN")
            self._run(statement, *values)
            return True

        with self._lock:
            return self._attempt(work, False)

    def _flush(self) -> None:
        self._written, added, self._added = time.monotonic(), self._added, False
        if self._open().in_transaction:
            self._run("COMMIT")
            if added:
                self._works_again()


def shrunk(image: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Shrink a picture, uint8 ``[H, W, 3]``, to a width of at most ``most`` pixels."""
    import cv2

    width = min(most, image.shape[1])
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def as_jpeg(image: NDArray[np.uint8]) -> bytes:
    """Encode uint8 RGB ``[H, W, 3]`` as JPEG. A tiny picture keeps full colour resolution, because it is shown enlarged."""
    import cv2

    settings = [cv2.IMWRITE_JPEG_QUALITY, 80]
    if image.shape[1] < TINY:
        settings = [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
    return bytes(cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), settings)[1])
