"""Store the snapshots of ``--state`` in a local folder, or at an address that fsspec can open.

The two newest snapshots are kept. Unfinished snapshots are not listed. With a key, a snapshot is an age file
(https://age-encryption.org/v1).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from fcntl import LOCK_UN
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO

from edgevlm.errors import SnapshotError, UserError
from edgevlm.packages import install, needs
from edgevlm.runtime.files import PRIVATE, UNFINISHED, atomic_write, lock_file, open_file, private_folder, reason
from edgevlm.runtime.snapshots.format import Arrays, Encrypted, OtherFormat, OtherSession, Snapshot, parts, read

LOCK = "lock"
SUFFIX = ".snapshot"
OTHER = ".other"  # suffix of a snapshot that was renamed instead of resumed
AGE = b"age-encryption.org/"
BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "az")  # object stores, which need no folders
PART_BYTES = 8 << 20
LOST = (errno.EIO, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EUCLEAN)  # permanent errors


def storage_of(where: str | Path) -> Folder | ObjectStore:
    """Return the storage at a path or an address such as ``s3://bucket/cameras``. Raises UserError."""
    return ObjectStore(str(where)) if is_address(where) else Folder(Path(str(where).removeprefix("file://")))


def is_address(where: str | Path) -> bool:
    """Return whether ``where`` is an fsspec address and not a local folder."""
    return isinstance(where, str) and "://" in where and not where.startswith("file://")


def snapshots(where: str | Path) -> list[Any]:
    """Return the paths of the snapshots in a folder or at an address, newest first. Raises OSError."""
    return storage_of(where).snapshots()


class Folder:
    """A local folder of snapshots. Only the process that holds the lock uses the folder. Symbolic links are not followed."""

    has_locks = True  # False on network disks without locks

    def __init__(self, path: Path) -> None:
        self.root = path
        self._lock = -1

    def __str__(self) -> str:
        return str(self.root)

    def take(self) -> None:
        """Create the folder if it is missing, and lock it. Raises BlockingIOError if the folder is in use."""
        private_folder(self.root)
        self._lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
        self.has_locks = lock_file(self._lock)
        for path in self.root.glob(f"*{UNFINISHED}"):
            path.unlink()
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "Permission denied")

    def snapshots(self) -> list[Path]:
        return _newest_first(self.root.glob(f"*{SUFFIX}"))

    def others(self) -> list[Path]:
        return list(self.root.glob(f"*{OTHER}"))

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def open(self, path: Path) -> BinaryIO:
        return open_file(path)

    def create(self, path: Path) -> AbstractContextManager[BinaryIO]:
        """Open a new file, which appears only if the ``with`` block succeeds. Raises OSError."""
        return atomic_write(path, private=True)

    def remove(self, path: Path) -> None:
        path.unlink()

    def why(self, error: OSError) -> str:
        return reason(error, self.root)

    def close(self) -> None:
        if self._lock >= 0:
            lock_file(self._lock, LOCK_UN)  # a forked process may still have the file open
            os.close(self._lock)
            self._lock = -1


class ObjectStore:
    """An object store's prefix or a remote folder, opened with fsspec. The address is not locked against other processes."""

    def __init__(self, address: str) -> None:
        self._scheme = address.partition("://")[0]
        self._name = re.sub(r"//[^/]*@", "//***@", address)
        with needs(f"--state {self._name}", "s3"):
            import fsspec
        try:
            self.files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
        except ImportError as error:  # fsspec's message names the missing package
            hint = install("s3") if self._scheme == "s3" else str(error)
            raise UserError(f"--state {self._name}: a package is missing: {hint}") from None
        except ValueError as error:
            raise UserError(f"--state {self._name}: {error}; give a folder, or an address that fsspec supports") from None
        self.root = PurePosixPath(root)

    def __str__(self) -> str:
        return self._name

    def take(self) -> None:
        """Raise OSError if the address is not writable."""
        probe = str(self.root / f"probe{UNFINISHED}")
        with as_os_error():
            self.make_folder(self.root)
            self.files.pipe_file(probe, b"edgevlm")
            self.files.rm_file(probe)

    def make_folder(self, path: PurePosixPath) -> None:
        if self._scheme not in BUCKETS:
            self.files.makedirs(str(path), exist_ok=True)

    def snapshots(self) -> list[PurePosixPath]:
        with as_os_error(), suppress(FileNotFoundError):
            return _newest_first(map(PurePosixPath, self.files.ls(str(self.root), detail=False)))
        return []

    def others(self) -> list[PurePosixPath]:
        with as_os_error(), suppress(FileNotFoundError):
            found = map(PurePosixPath, self.files.ls(str(self.root), detail=False))
            return [path for path in found if path.suffix == OTHER]
        return []

    def rename(self, path: PurePosixPath, to: PurePosixPath) -> None:
        with as_os_error():
            self.files.mv(str(path), str(to))

    def open(self, path: PurePosixPath) -> BinaryIO:
        with as_os_error():
            stream: BinaryIO = self.files.open(str(path), "rb", block_size=PART_BYTES, cache_type="readahead")
            return stream

    @contextmanager
    def create(self, path: PurePosixPath) -> Iterator[BinaryIO]:
        """Open a new object, which appears only if the ``with`` block succeeds. Raises OSError."""
        with as_os_error():
            stream = self.files.open(str(path), "wb", block_size=PART_BYTES, autocommit=False)
            try:
                yield stream
                stream.close()
                stream.commit()
            except BaseException:
                with suppress(Exception):
                    stream.discard()
                with suppress(AttributeError):
                    stream.closed = True  # keeps the garbage collector from uploading the file
                raise

    def remove(self, path: PurePosixPath) -> None:
        with as_os_error():
            self.files.rm_file(str(path))

    def why(self, error: OSError) -> str:
        return " ".join((error.strerror or str(error) or type(error).__name__).split())[:300]

    def close(self) -> None: ...


@contextmanager
def as_os_error() -> Iterator[None]:
    """Convert any exception of a storage client to OSError."""
    try:
        yield
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class SnapshotKey:
    """The age key that encrypts snapshots. ``text``: ``AGE-SECRET-KEY-1...``; lines that begin with ``#`` are ignored.

    Raises UserError for an invalid key, without showing the key.
    """

    def __init__(self, text: str) -> None:
        self._age = _pyrage()
        keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        try:
            (key,) = keys
            self._identity = self._age.x25519.Identity.from_str(key)
        except (ValueError, self._age.IdentityError):
            raise UserError("the key for --state is not an age key; create one with edgevlm state key FILE") from None

    @staticmethod
    def generate() -> str:
        """Generate an age key, and return it as text."""
        return str(_pyrage().x25519.Identity.generate())

    def encrypt(self, content: Iterator[bytes | memoryview], stream: BinaryIO) -> None:
        """Write the encrypted content to a stream. Raises OSError."""
        try:
            self._age.encrypt_io(_Reader(content), stream, [self._identity.to_public()])
        except self._age.EncryptError as error:
            raise OSError(str(error)) from None

    def decrypt(self, stream: BinaryIO, plain: BinaryIO) -> None:
        """Write the decrypted content to ``plain``. Raises SnapshotError."""
        try:
            self._age.decrypt_io(stream, plain, [self._identity])
        except (self._age.DecryptError, OSError) as error:
            if str(error).startswith("No matching keys"):
                raise Encrypted("is encrypted with another key") from None
            raise SnapshotError(f"is damaged or incomplete (it cannot be decrypted: {error})") from None


class _Reader:
    """A stream that reads an iterator's chunks of bytes one after another."""

    def __init__(self, content: Iterator[bytes | memoryview]) -> None:
        self._content, self._part = content, memoryview(b"")

    def read(self, size: int) -> bytes:
        while not self._part and (part := next(self._content, None)) is not None:
            self._part = memoryview(part)
        taken, self._part = self._part[:size], self._part[size:]
        return bytes(taken)


def _pyrage() -> Any:
    with needs("snapshot encryption", "encryption"):
        import pyrage
    return pyrage


class SnapshotDirectory:
    """A folder of snapshots, which only this process uses until :meth:`close`, or an fsspec address, which is not locked.

    ``key``: the key that encrypts new snapshots. Raises UserError if the folder cannot be written or another process uses it.
    """

    def __init__(self, path: str | Path, key: SnapshotKey | None = None) -> None:
        if not str(path).strip():
            raise UserError("--state '': give a folder")
        self.storage, self._key = storage_of(path), key
        self._kept: PurePath | None = None  # the newest snapshot known to be valid
        try:
            self.storage.take()
            self._number = max(map(_number, self.storage.snapshots()[:1]), default=0)
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise UserError(f"--state {path}: in use by another process; stop it or choose another folder") from None
            why = self.storage.why(error)
            raise UserError(f"--state {self.storage}: cannot be written ({why}); choose another folder") from None

    @property
    def folder(self) -> Path | None:
        """The local folder of the snapshots, or None if the snapshots are at an address."""
        return self.storage.root if isinstance(self.storage, Folder) else None

    def resume(
        self,
        wanted: Mapping[str, Any],
        take: Callable[[Snapshot], object] = lambda _: None,
        begin_again: bool = False,
    ) -> tuple[Snapshot | None, list[str]]:
        """Return the newest usable snapshot of a session, and a one-line message for each newer snapshot that was refused.

        ``wanted``: the session's identity. ``take``: a function that restores a snapshot. If it raises SnapshotError, an older
        snapshot is tried. If no snapshot is usable, snapshots of a different version are renamed with the suffix OTHER.
        ``begin_again`` also renames snapshots of a different session. Raises UserError if a snapshot cannot be decrypted or,
        without ``begin_again``, belongs to a different session.
        """
        refused: list[str] = []
        others: list[tuple[PurePath, OtherFormat]] = []
        for path, found in self.verified():
            try:
                if isinstance(found, SnapshotError):
                    raise found
                identity = found.about["identity"]
                if other := difference(identity, wanted):
                    raise (OtherFormat if is_older(identity, wanted) else OtherSession)(other)
                take(found)
                self._kept = path
                return found, refused
            except SnapshotError as error:
                refused.append(f"{path.name} {error}")
                if isinstance(error, OtherFormat):
                    others.append((path, error))
        for path, other_format in others:
            if isinstance(other_format, Encrypted) or (isinstance(other_format, OtherSession) and not begin_again):
                same = "run with the same settings as before, or choose another folder"
                raise UserError(f"--state {self.storage}: {path.name} {other_format}; {same}")
        self._set_aside([path for path, _ in others])
        return None, refused

    def _set_aside(self, paths: list[PurePath]) -> None:
        """Rename snapshots with the suffix OTHER, and delete snapshots renamed earlier. Raises OSError."""
        storage: Any = self.storage
        for path in storage.others() if paths else ():
            if path.stem.isdecimal():
                storage.remove(path)
        for path in paths:
            storage.rename(path, path.with_suffix(OTHER))

    def write(self, about: Mapping[str, Any], arrays: Arrays, alone: bool = False) -> PurePath:
        """Write a snapshot, and delete all earlier snapshots except the newest valid one.

        ``alone``: whether to delete all earlier snapshots, including renamed snapshots. Raises UserError, and writes nothing,
        if another process has written a newer snapshot. Raises OSError if writing fails or, with ``alone``, if deleting fails.
        """
        storage: Any = self.storage
        if any(_number(path) > self._number for path in storage.snapshots()[:1]):
            raise UserError(f"another process has written a newer snapshot to {storage}; stop one of them")
        self._number += 1
        target = storage.root / f"{self._number:08d}{SUFFIX}"
        with storage.create(target) as stream:
            if self._key is not None:
                self._key.encrypt(parts(about, arrays), stream)
            else:
                stream.writelines(parts(about, arrays))
        keep, self._kept = (target, None if alone else self._kept), target
        try:
            for path in storage.snapshots():
                if path not in keep and _number(path) < self._number:
                    storage.remove(path)
            for path in storage.others() if alone else ():
                storage.remove(path)
        except OSError:  # the new snapshot is complete, so leftover old snapshots do no harm
            if alone:
                raise
        return target

    def verified(self) -> Iterator[tuple[PurePath, Snapshot | SnapshotError]]:
        return verified(self.storage, self._key)

    def clear(self) -> int:
        """Delete all snapshots, and return their number. Raises UserError."""
        storage: Any = self.storage
        try:
            found = storage.snapshots() + storage.others()
            for path in found:
                storage.remove(path)
        except OSError as error:
            raise UserError(f"{storage}: cannot be deleted ({storage.why(error)})") from None
        return len(found)

    def close(self) -> None:
        self.storage.close()


def verified(
    where: str | Path | Folder | ObjectStore, key: SnapshotKey | None = None
) -> Iterator[tuple[PurePath, Snapshot | SnapshotError]]:
    """Yield each snapshot's path, newest first, with the snapshot or the error that makes it unusable. Raises OSError."""
    storage = storage_of(where) if isinstance(where, str | Path) else where
    for path in storage.snapshots():
        try:
            yield path, read_at(storage, path, key)
        except SnapshotError as error:
            yield path, error


def read_at(storage: Folder | ObjectStore, path: Any, key: SnapshotKey | None = None) -> Snapshot:
    """Read and verify a snapshot. Encrypted and remote snapshots are read into memory, never copied to disk.

    Raises SnapshotError if the snapshot is unusable, and UserError if a later attempt may succeed.
    """
    try:
        with as_os_error(), storage.open(path) as stream:
            is_encrypted = stream.read(len(AGE)) == AGE
            stream.seek(0)
            if isinstance(path, Path) and not is_encrypted:
                return read(stream, path)
            if is_encrypted and key is None:
                raise Encrypted("is encrypted; add its key with --state-key-file")
            with open(os.memfd_create("edgevlm-snapshot"), "w+b") as plain:
                if is_encrypted and key is not None:
                    key.decrypt(stream, plain)
                else:
                    shutil.copyfileobj(stream, plain, 1 << 20)
                plain.seek(0)
                return read(plain, path)
    except OSError as error:
        why = storage.why(error)
        if error.errno == errno.ENOENT or (isinstance(path, Path) and error.errno in LOST):
            raise SnapshotError(f"cannot be read ({why})") from None
        raise UserError(f"{path}: cannot be read now ({why}); nothing was overwritten") from None


def is_older(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a snapshot was made with a model of the same name, but with a different version of the bundle or of
    edgevlm.
    """
    return bool(found["model"] != wanted["model"] and found["name"] == wanted["name"])


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return why a snapshot does not belong to this session, or an empty string if the snapshot does belong to it."""
    if found.get("dtype") != wanted["dtype"]:
        return f"holds {_brief(found.get('dtype'))} keys and values, but this model uses {wanted['dtype']}"
    if found["model"] != wanted["model"]:
        return f"belongs to another model ({_brief(found['name'])})"
    for name, mine in wanted.items():
        if name != "name" and found.get(name) != mine:
            return f"was written with {name} {_brief(found.get(name))}, but this run uses {mine}"
    return ""


def _brief(value: object) -> str:
    return " ".join(str(value)[:200].split())


def _newest_first(paths: Iterator[PurePath]) -> list[Any]:
    found = (path for path in paths if path.suffix == SUFFIX and path.stem.isdecimal())
    return sorted(found, key=_number, reverse=True)


def _number(path: PurePath) -> int:
    return int(path.stem)
