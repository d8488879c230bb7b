"""The directory of ``--state``: one process at a time, two generations of snapshots, each complete or absent.

With a key they are files of age, https://age-encryption.org/v1, made and opened with pyrage.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from edgevlm.errors import SnapshotError, UserError
from edgevlm.packages import needs
from edgevlm.runtime.snapshots.capture import check_header
from edgevlm.runtime.snapshots.format import Arrays, OtherFormat, Snapshot, parts, read, unreadable
from edgevlm.runtime.snapshots.storage import SUFFIX, Folder, ObjectStore, as_os_error, storage_of

AGE = b"age-encryption.org/"  # begins an encrypted file


def _pyrage() -> Any:
    with needs("encrypted snapshots", "encryption"):
        import pyrage
    return pyrage


class SnapshotKey:
    """A key of age, ``AGE-SECRET-KEY-1...``, as text; lines of ``#`` are comments. Raises UserError, without repeating it."""

    def __init__(self, text: str) -> None:
        self._age = _pyrage()
        keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        try:
            (key,) = keys
            self._identity = self._age.x25519.Identity.from_str(key)
        except (ValueError, self._age.IdentityError):
            raise UserError("the key of --state is none of age; edgevlm state key FILE makes one") from None

    @staticmethod
    def generate() -> str:
        """Return the text of a new key."""
        return str(_pyrage().x25519.Identity.generate())

    def encrypt(self, parts: Iterable[bytes | memoryview], stream: BinaryIO) -> None:
        """Raises OSError."""
        try:
            self._age.encrypt_io(_Joined(parts), stream, [self._identity.to_public()])
        except self._age.EncryptError as error:
            raise OSError(str(error)) from None

    def decrypt(self, stream: BinaryIO, plain: BinaryIO) -> None:
        """Raises SnapshotError."""
        try:
            self._age.decrypt_io(stream, plain, [self._identity])
        except (self._age.DecryptError, OSError) as error:
            if str(error).startswith("No matching keys"):
                raise OtherFormat("is encrypted with another key") from None
            raise SnapshotError(f"is damaged, or was not read whole (it cannot be decrypted: {error})") from None


def read_at(place: Folder | ObjectStore, path: Any, key: SnapshotKey | None) -> Snapshot:
    """Read and verify a snapshot. An encrypted or remote one is held in memory, never on disk. Raises SnapshotError."""
    try:
        with as_os_error(), place.open(path) as stream:
            is_encrypted = stream.read(len(AGE)) == AGE
            if isinstance(path, Path) and not is_encrypted:
                return read(path)
            if is_encrypted and key is None:
                raise OtherFormat("is encrypted; give its key with --state-key-file")
            stream.seek(0)
            with open(os.memfd_create("edgevlm-snapshot"), "wb") as plain:
                if is_encrypted and key is not None:
                    key.decrypt(stream, plain)
                else:
                    shutil.copyfileobj(stream, plain, 1 << 20)
                plain.flush()
                return read(Path(f"/proc/self/fd/{plain.fileno()}"), path)
    except OSError as error:
        raise unreadable(path, error, place.why(error)) from None


class _Joined(io.RawIOBase):
    """Parts that are read one after the other."""

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self._parts, self._now = iter(parts), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        target, count = memoryview(into).cast("B"), 0
        while count < len(target):
            if not self._now:
                part = next(self._parts, None)
                if part is None:
                    break
                self._now = memoryview(part).cast("B")
            taken = self._now[: len(target) - count]
            target[count : count + len(taken)] = taken
            self._now, count = self._now[len(taken) :], count + len(taken)
        return count


def verified(
    where: str | Path | Folder | ObjectStore, key: SnapshotKey | None = None
) -> Iterator[tuple[PurePath, Snapshot | SnapshotError]]:
    """Yield each snapshot of a folder or an address, newest first, or why it cannot be used. Raises OSError."""
    storage = storage_of(where) if isinstance(where, str | Path) else where
    for path in storage.snapshots():
        try:
            found = read_at(storage, path, key)
            check_header(found.about)
            yield path, found
        except SnapshotError as error:
            yield path, error


class SnapshotDirectory:
    """A folder that only this process writes to, until :meth:`close`, or an address of an object store.

    key: encrypts what is written. Raises UserError, one line, when it cannot be made or written, or another process has it.
    """

    def __init__(self, path: str | Path, key: SnapshotKey | None = None) -> None:
        if not str(path).strip():
            raise UserError("--state '': give a folder")
        self.storage, self._key = storage_of(path), key
        self._kept: PurePath | None = None  # the newest that is known to be good
        try:
            self.storage.take()
            self._number = max(map(_number, self.storage.snapshots()[:1]), default=0)
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise UserError(f"--state {path}: another process uses it; end that one, or choose another folder") from None
            if isinstance(error, OSError):
                why = self.storage.why(error)
                raise UserError(f"--state {self.storage}: cannot be written ({why}); choose another folder") from None
            raise

    @property
    def folder(self) -> Path | None:
        """The folder, where other files may be beside the snapshots; None at an address."""
        return self.storage.root if isinstance(self.storage, Folder) else None

    def resume(
        self, wanted: Mapping[str, Any], take: Callable[[Snapshot], object] = lambda _: None
    ) -> tuple[Snapshot | None, list[str]]:
        """Return the newest good snapshot of a session with the identity ``wanted``, and why newer ones were refused.

        take: restores it, or raises SnapshotError: then the one before is tried. Raises UserError if the good snapshots are
        of another session: they must not be replaced.
        """
        refused: list[str] = []
        others: list[str] = []
        for path, found in self.verified():
            if isinstance(found, SnapshotError):
                why, is_other = str(found), isinstance(found, OtherFormat)
            elif why := difference(found.about["identity"], wanted):
                is_other = True
            else:
                try:
                    take(found)
                    self._kept = path
                    return found, refused
                except SnapshotError as error:
                    why, is_other = str(error), False
            refused.append(f"{path.name} {why}")
            if is_other:
                others.append(refused[-1])
        if others:
            same = "run with the same settings as before, or choose another folder"
            raise UserError(f"--state {self.storage}: {others[0]}; {same}")
        return None, refused

    def write(self, about: Mapping[str, Any], arrays: Arrays, alone: bool = False) -> PurePath:
        """Write the next generation and remove all but the newest good one before it; with ``alone`` that one too.

        Raises OSError (with ``alone`` also if one cannot be removed), and UserError if another process wrote a newer one;
        nothing is lost then.
        """
        storage: Any = self.storage
        if any(_number(path) > self._number for path in storage.snapshots()[:1]):
            raise UserError(f"another process has written a newer snapshot to {storage}; end one of them")
        self._number += 1
        target = storage.root / f"{self._number:08d}{SUFFIX}"
        with storage.create(target) as stream:
            if self._key is not None:
                self._key.encrypt(parts(about, arrays), stream)
            else:
                stream.writelines(parts(about, arrays))
        before, self._kept = None if alone else self._kept, target
        with nullcontext() if alone else suppress(OSError):  # the new one is good already
            for path in storage.snapshots():
                if path not in (before, target) and _number(path) < self._number:
                    with nullcontext() if alone else suppress(OSError):  # a folder, for example
                        storage.remove(path)
        return target

    def verified(self) -> Iterator[tuple[PurePath, Snapshot | SnapshotError]]:
        return verified(self.storage, self._key)

    def clear(self) -> int:
        """Remove all snapshots; returns their number. Raises UserError."""
        storage: Any = self.storage
        try:
            found = storage.snapshots()
            for path in found:
                storage.remove(path)
        except OSError as error:
            raise UserError(f"{storage}: cannot be deleted ({storage.why(error)})") from None
        return len(found)

    def close(self) -> None:
        """Let another process have it."""
        self.storage.close()


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describe in words why a snapshot is of another session; empty if it is not."""
    if found.get("dtype") != wanted["dtype"]:
        return f"holds {_brief(found.get('dtype'))} keys and values, and this model keeps {wanted['dtype']}"
    if found["model"] != wanted["model"]:
        return f"is of another model ({_brief(found['name'])})"
    for name, mine in wanted.items():
        if name != "name" and found.get(name) != mine:
            return f"was made with {name} {_brief(found.get(name))} and this run has {mine}"
    return ""


def _brief(value: object) -> str:
    return " ".join(str(value)[:200].split())


def _number(path: PurePath) -> int:
    return int(path.stem)
