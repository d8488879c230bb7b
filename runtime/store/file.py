"""Read and write a store's file, which holds records. The file grows in steps. Only one process at a time uses the file."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from contextlib import suppress
from fcntl import LOCK_UN
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from edgevlm.errors import UserError
from edgevlm.runtime.files import PRIVATE, lock_file

TEMPORARY = "temporary"
MAGIC = b"EVSTORE\x1a"
FORMAT = 1
HEADER = struct.Struct("<8sIIQ32s")  # magic, format, CRC-32 of the rest, token, SHA-256 of the identity
START = 4096
STEP = 16 << 20  # the file grows by this many bytes


class Extent(NamedTuple):
    """Where a record is in the file, and the record's stamp.

    If the file has a different stamp at this place, the record was overwritten.
    """

    offset: int
    nbytes: int
    stamp: int


class OtherStore(UserError):
    """The error for a store of a different stream or of a different format version."""


class StoreFile:
    """A store's file, which only this process uses until :meth:`close`.

    ``path``: the file, created if missing; ``temporary`` for an unnamed file, which disappears when this process ends.
    ``identity``: a text that identifies the stream that owns the blocks. ``limit``: the file's largest size in bytes.
    ``token``: a random number that identifies the file; snapshots record it.

    Raises a one-line UserError if the file cannot be written, is not a store, belongs to a different stream, or is in use.
    """

    def __init__(self, path: str | Path, identity: str, limit: int) -> None:
        self.path, self.limit, self._handle = Path(path), limit, -1
        self.name = "the temporary store" if str(path) == TEMPORARY else str(path)
        try:
            self._handle = _nameless() if str(path) == TEMPORARY else os.open(path, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
            self._begin(hashlib.sha256(identity.encode()).digest())
        except OSError as error:
            self.close()
            elsewhere = "set TMPDIR to another folder" if str(path) == TEMPORARY else "choose another folder"
            raise UserError(f"{self.name}: cannot be created or written ({error.strerror}); {elsewhere}") from None
        except BaseException:
            self.close()
            raise

    def _begin(self, identity: bytes) -> None:
        try:
            lock_file(self._handle)
        except BlockingIOError:
            raise UserError(f"{self.name}: in use by another process; stop it or choose another folder") from None
        self.nbytes = os.fstat(self._handle).st_size
        start = os.pread(self._handle, HEADER.size, 0)
        if not start.strip(b"\0"):  # the file is new, or its first write did not reach the disk
            self.token = int.from_bytes(os.urandom(8), "little")
            self.write(_header(self.token, identity).ljust(START, b"\0"), 0)
            return
        if len(start) < HEADER.size or not start.startswith(MAGIC):
            raise UserError(f"{self.name}: is not an edgevlm store; move it away, or choose another folder")
        _, version, _, self.token, owner = HEADER.unpack(start)
        if version != FORMAT:
            raise OtherStore(f"{self.name}: has store format {version}, but this edgevlm supports {FORMAT}; remove it")
        if start != _header(self.token, owner):
            raise UserError(f"{self.name}: has a damaged header; remove it (its content is lost)")
        if owner != identity:
            raise OtherStore(f"{self.name}: belongs to another stream; use that stream's settings, or choose another folder")
        if self.nbytes > self.limit:
            os.ftruncate(self._handle, self.limit)
            self.nbytes = self.limit

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all data at an offset of the file, after allocating space if needed. Raises OSError."""
        if (end := offset + len(data)) > self.nbytes:
            step = min(-(-end // STEP) * STEP, self.limit)
            try:
                os.posix_fallocate(self._handle, self.nbytes, step - self.nbytes)
                self.nbytes = step
            except OSError:  # a whole step does not fit on the disk: allocate only what is needed
                os.posix_fallocate(self._handle, self.nbytes, end - self.nbytes)
                self.nbytes = end
        rest = memoryview(data)
        while rest:
            done = os.pwrite(self._handle, rest, offset)
            rest, offset = rest[done:], offset + done

    def expect(self, extent: Extent) -> None:
        """Ask the operating system to prefetch a record."""
        with suppress(OSError):
            os.posix_fadvise(self._handle, extent.offset, extent.nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, extent: Extent) -> bytes:
        """Return a record's bytes, or fewer if the file is too short or cannot be read."""
        data = b""
        with suppress(OSError):
            while (left := extent.nbytes - len(data)) and (part := os.pread(self._handle, left, extent.offset + len(data))):
                data += part
        return data

    def sync(self) -> None:
        """Flush the file to disk. Raises OSError."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        if self._handle >= 0:
            lock_file(self._handle, LOCK_UN)  # a forked process may still have the file open
            os.close(self._handle)
            self._handle = -1


def _header(token: int, owner: bytes) -> bytes:
    bare = HEADER.pack(MAGIC, FORMAT, 0, token, owner)
    return HEADER.pack(MAGIC, FORMAT, crc32(bare), token, owner)


def _nameless() -> int:
    """Open an unnamed file in the folder TMPDIR if set, else in /var/tmp if writable, else in Python's temporary folder."""
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir())
    with suppress(OSError):  # some file systems do not support O_TMPFILE
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    handle, name = tempfile.mkstemp(prefix="edgevlm-", dir=folder)
    os.unlink(name)
    return handle
