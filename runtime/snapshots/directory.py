"""The directory of ``--state``: one process at a time, two generations of snapshots, each complete or absent."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgevlm.errors import SnapshotError, UserError
from edgevlm.runtime.atomic import flush
from edgevlm.runtime.paths import PRIVATE, private_folder
from edgevlm.runtime.snapshots.capture import check_header, lost
from edgevlm.runtime.snapshots.format import Arrays, OtherFormat, Snapshot, read, write

LOCK = "lock"
SUFFIX = ".snapshot"
UNFINISHED = ".unfinished"


def snapshots(folder: Path) -> list[Path]:
    """The snapshots in a folder, newest first."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()), key=_number, reverse=True)


def verified(folder: Path) -> Iterator[tuple[Path, Snapshot | SnapshotError]]:
    """Each snapshot of a folder, newest first, or why it cannot be used."""
    for path in snapshots(folder):
        try:
            found = read(path)
            check_header(found.about)
            yield path, found
        except SnapshotError as error:
            yield path, error


class SnapshotDirectory:
    """A folder that this process alone writes to, until :meth:`close`.

    Raises UserError, one line, when it cannot be made or written, or when another process has it.
    """

    def __init__(self, path: str | Path) -> None:
        if not str(path).strip():
            raise UserError("--state '': give a folder")
        self.path = Path(path)
        try:
            private_folder(self.path)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
        except OSError as error:
            raise UserError(f"--state {path}: cannot be written ({error.strerror}); choose another folder") from None
        try:
            self._take()
            self._number = max(map(_number, snapshots(self.path)), default=0)
        except OSError as error:
            self.close()
            raise UserError(f"--state {path}: cannot be written ({error.strerror}); choose another folder") from None
        except BaseException:
            self.close()
            raise
        self._kept: Path | None = None  # the newest that is known to be good

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--state {self.path}: another process uses it; end that one, or choose another folder") from None
        for path in self.path.glob(f"*{UNFINISHED}"):
            path.unlink()
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "Permission denied")

    def resume(
        self, wanted: Mapping[str, Any], take: Callable[[Snapshot], object] = lambda _: None
    ) -> tuple[Snapshot | None, list[str]]:
        """The newest good snapshot of a session with the identity ``wanted``, and why newer ones were refused.

        take: goes on from it, or raises SnapshotError: then the one before is tried. Raises UserError where what is there is
        good and of another session: it must not be overwritten.
        """
        refused: list[str] = []
        others: list[str] = []
        for path, found in verified(self.path):
            why = str(found) if isinstance(found, SnapshotError) else difference(found.about["identity"], wanted)
            fits = not why
            if fits and isinstance(found, Snapshot):
                try:
                    take(found)
                except SnapshotError as error:
                    why = str(error)
                else:
                    self._kept = path
                    return found, refused
            refused.append(f"{path.name} {why}")
            if isinstance(found, Snapshot | OtherFormat) and not fits:
                others.append(refused[-1])
        if others:
            same = "run with the same settings as before, or choose another folder"
            raise UserError(f"--state {self.path}: {others[0]}; {same}")
        return None, refused

    def write(self, about: Mapping[str, Any], arrays: Arrays, alone: bool = False) -> Path:
        """Write the next generation and remove all but the newest good one before it; that too, where it is to be ``alone``.

        Raises OSError; nothing is lost then.
        """
        self._number += 1
        target = self.path / f"{self._number:08d}{SUFFIX}"
        unfinished = target.with_suffix(UNFINISHED)
        try:
            with open(unfinished, "wb", opener=_private) as stream:
                write(stream, about, arrays)
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(unfinished, target)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        flush(self.path)
        before, self._kept = None if alone else self._kept, target
        for path in snapshots(self.path):
            if path not in (before, target):
                with suppress(OSError):  # a folder, say: what was written is good
                    path.unlink()
        return target

    def lost(self) -> str:
        """What its snapshots held, where none can be used."""
        return "; ".join(map(lost, snapshots(self.path)))

    def close(self) -> None:
        """Let another process have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In what a snapshot is of another session, in words; empty where it is not."""
    if found.get("dtype") != wanted["dtype"]:
        return f"holds {_brief(found.get('dtype'))} keys and values, and this model keeps {wanted['dtype']}"
    if found["model"] != wanted["model"]:
        return f"is of another model ({_brief(found['name'])})"
    for name, mine in wanted.items():
        if name != "name" and found.get(name) != mine:
            return f"was made with {name} {_brief(found.get(name))} and this run has {mine}"
    return ""


def _brief(value: object) -> str:
    """As a line has it."""
    return " ".join(str(value)[:200].split())


def _private(path: str, flags: int) -> int:
    """Open for the user alone: it is what a camera has seen."""
    return os.open(path, flags | PRIVATE, 0o600)


def _number(path: Path) -> int:
    return int(path.stem)
