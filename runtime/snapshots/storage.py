"""Places of snapshots: a folder, or an address that fsspec knows. A name there holds a whole snapshot, or does not exist."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO

from edgevlm.errors import UserError
from edgevlm.packages import install, needs
from edgevlm.runtime.files import PRIVATE, UNFINISHED, atomic_write, open_file, private_folder, reason

LOCK = "lock"
SUFFIX = ".snapshot"
BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "az")  # stores without folders, where a bucket is not ours to make
PART_BYTES = 8 << 20  # of an upload


def storage_of(where: str | Path) -> Folder | ObjectStore:
    """Return the storage at a path or an address such as ``s3://bucket/cameras``. Raises UserError for unknown addresses."""
    return ObjectStore(str(where)) if is_address(where) else Folder(Path(str(where).removeprefix("file://")))


def is_address(where: str | Path) -> bool:
    """Whether ``where`` is not a folder of this machine."""
    return isinstance(where, str) and "://" in where and not where.startswith("file://")


def snapshots(where: str | Path) -> list[Any]:
    """Return the snapshots in a folder or at an address, newest first. Raises OSError."""
    return storage_of(where).snapshots()


def _newest_first(paths: Iterator[PurePath]) -> list[Any]:
    found = (path for path in paths if path.suffix == SUFFIX and path.stem.isdecimal())
    return sorted(found, key=lambda path: int(path.stem), reverse=True)


class Folder:
    """A local folder: writes are flushed to the disk, links are not followed, and one process at a time holds its lock."""

    def __init__(self, path: Path) -> None:
        self.root = path
        self._lock = -1

    def __str__(self) -> str:
        return str(self.root)

    def take(self) -> None:
        """Make the folder if it is missing, and lock it. Raises OSError, BlockingIOError if another process has it."""
        private_folder(self.root)
        self._lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in self.root.glob(f"*{UNFINISHED}"):
            path.unlink()
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "Permission denied")

    def snapshots(self) -> list[Path]:
        """Newest first."""
        return _newest_first(self.root.glob(f"*{SUFFIX}"))

    def open(self, path: Path) -> BinaryIO:
        """Raises OSError."""
        return open_file(path)

    def create(self, path: Path) -> AbstractContextManager[BinaryIO]:
        """Open a file for writing; it appears once the block has ended well. Raises OSError."""
        return atomic_write(path, private=True)

    def remove(self, path: Path) -> None:
        path.unlink()

    def why(self, error: OSError) -> str:
        return reason(error, self.root)

    def close(self) -> None:
        """Let another process have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class ObjectStore:
    """A prefix of an object store, or a folder of another machine, opened by fsspec. It has no lock."""

    def __init__(self, address: str) -> None:
        self._scheme = address.partition("://")[0]
        self._name = re.sub(r"//[^/]*@", "//***@", address)
        with needs(f"--state {self._name}", "s3"):
            import fsspec
        try:
            self.files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
        except ImportError as error:  # it names the package that the protocol needs
            hint = install("s3") if self._scheme == "s3" else str(error)
            raise UserError(f"--state {self._name}: a package is missing: {hint}") from None
        except ValueError as error:
            raise UserError(f"--state {self._name}: {error}; give a folder, or an address that fsspec knows") from None
        self.root = PurePosixPath(root)

    def __str__(self) -> str:
        return self._name

    def take(self) -> None:
        """Raises OSError if the store cannot be written."""
        probe = str(self.root / f"probe{UNFINISHED}")
        with as_os_error():
            self.make_folder(self.root)
            self.files.pipe_file(probe, b"edgevlm")
            self.files.rm_file(probe)

    def make_folder(self, path: PurePosixPath) -> None:
        if self._scheme not in BUCKETS:
            self.files.makedirs(str(path), exist_ok=True)

    def snapshots(self) -> list[PurePosixPath]:
        """Newest first. Raises OSError."""
        with as_os_error():
            try:
                return _newest_first(map(PurePosixPath, self.files.ls(str(self.root), detail=False)))
            except FileNotFoundError:
                return []

    def open(self, path: PurePosixPath) -> BinaryIO:
        """Raises OSError."""
        with as_os_error():
            stream: BinaryIO = self.files.open(str(path), "rb", block_size=PART_BYTES, cache_type="readahead")
            return stream

    @contextmanager
    def create(self, path: PurePosixPath) -> Iterator[BinaryIO]:
        """Open an object for writing; it appears once the block has ended well. Raises OSError."""
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
                    stream.closed = True  # else it is sent when it is collected
                raise

    def remove(self, path: PurePosixPath) -> None:
        with as_os_error():
            self.files.rm_file(str(path))

    def why(self, error: OSError) -> str:
        return " ".join((error.strerror or str(error) or type(error).__name__).split())[:300]

    def close(self) -> None: ...


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raise OSError for whatever the client of a store raises."""
    try:
        yield
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
