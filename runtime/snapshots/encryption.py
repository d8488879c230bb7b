"""Snapshots that only a key reads: files of age, https://age-encryption.org/v1, made and opened with pyrage."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from edgevlm.errors import SnapshotError, UserError
from edgevlm.packages import needs
from edgevlm.runtime.snapshots.format import OtherFormat, Snapshot, read, unreadable
from edgevlm.runtime.snapshots.storage import Folder, ObjectStore, as_os_error

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
