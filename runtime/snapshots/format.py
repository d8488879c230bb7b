"""One snapshot in one file: a preamble, a JSON header and arrays as raw bytes, all under CRC-32. Nothing is pickled.

docs/internals/snapshots.md draws the layout.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from edgevlm.errors import SnapshotError, UserError
from edgevlm.runtime.files import open_file

FORMAT = 2
MAGIC = b"EDGEVLM\x1a"
PREAMBLE = struct.Struct("<8sIIQ")  # magic, format, CRC-32 of the header, bytes of preamble and header with its padding
ALIGNMENT = 64
LARGEST_HEADER = 1 << 28
LOST = (errno.EIO, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EUCLEAN)  # to this disk
KINDS = r"\|b1|\|[iu]1|<[iu][248]|<f[248]"  # numpy's, of the arrays that there can be

Arrays = Mapping[str, NDArray]


class OtherFormat(SnapshotError):
    """A snapshot that another edgevlm, or one with another key, can read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A verified file. about: its header. arrays: read-only, mapped."""

    path: PurePath
    nbytes: int
    about: Mapping[str, Any]
    arrays: Arrays


def padding(size: int) -> int:
    return -size % ALIGNMENT


def parts(about: Mapping[str, Any], arrays: Arrays) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a snapshot, in order. about: JSON, without the key ``sections``. arrays: dense."""
    flat = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for name, array in arrays.items()}
    sections, offset = [], 0
    for name, array in arrays.items():
        size, zeros = flat[name].nbytes, bytes(padding(flat[name].nbytes))
        kind = array.dtype.newbyteorder("<").str
        sections.append([name, kind, list(array.shape), offset, crc32(zeros, crc32(flat[name]))])
        offset += size + len(zeros)
    text = json.dumps({**about, "bytes": offset, "sections": sections}, ensure_ascii=False).encode(errors="replace")
    header_bytes = PREAMBLE.size + len(text) + padding(PREAMBLE.size + len(text))
    body = text.ljust(header_bytes - PREAMBLE.size, b" ")
    yield PREAMBLE.pack(MAGIC, FORMAT, _header_sum(header_bytes, body), header_bytes) + body
    for part in flat.values():
        yield part
        yield bytes(padding(part.nbytes))


def read(path: Path, of: PurePath | None = None) -> Snapshot:
    """Read and verify a snapshot, a copy ``of`` another path if given. Raises SnapshotError, without the file's name."""
    try:
        with open_file(path) as stream:
            about, start = _read_header(stream)
            block = np.memmap(path, np.uint8, "r", start, (about["bytes"],)) if about["bytes"] else np.zeros(0, np.uint8)
            arrays = {section[0]: _array(stream, start, block, *section) for section in about["sections"]}
            return Snapshot(of or path, start + about["bytes"], about, arrays)
    except OSError as error:
        raise unreadable(of or path, error, error.strerror) from None
    except ValueError:  # the header's JSON, or numpy's for sizes that only overflow together
        raise SnapshotError("does not describe itself") from None


def _read_header(stream: BufferedReader) -> tuple[dict[str, Any], int]:
    """Return a snapshot's header, and where its arrays begin. Raises SnapshotError, ValueError and OSError."""
    start = stream.read(PREAMBLE.size)
    if len(start) < PREAMBLE.size or not start.startswith(MAGIC):
        raise SnapshotError("is no snapshot, or torn at its start")
    _, version, checksum, header_bytes = PREAMBLE.unpack(start)
    if version != FORMAT:
        upgrade = "; upgrade edgevlm" if version > FORMAT else ""
        raise OtherFormat(f"is of snapshot format {version} and this edgevlm reads format {FORMAT}{upgrade}")
    body = stream.read(header_bytes - PREAMBLE.size) if PREAMBLE.size <= header_bytes <= LARGEST_HEADER else b""
    if _header_sum(header_bytes, body) != checksum:
        raise SnapshotError("is damaged (the checksum of its header does not match)")
    about, size = from_json(body, allow_inf_nan=False), os.fstat(stream.fileno()).st_size
    described = isinstance(about, dict) and type(about.get("bytes")) is int and about["bytes"] >= 0
    if not described or not isinstance(sections := about.get("sections"), list) or not all(map(_is_section, sections)):
        raise SnapshotError("does not describe itself")
    if size != header_bytes + about["bytes"]:
        raise SnapshotError(f"is torn ({size} bytes, not {header_bytes + about['bytes']})")
    return about, header_bytes


def unreadable(path: PurePath, error: OSError, why: str | None) -> UserError:
    """SnapshotError where the disk has lost the snapshot; else another try may read it, and it must not be replaced."""
    if error.errno == errno.ENOENT or (isinstance(path, Path) and error.errno in LOST):
        return SnapshotError(f"cannot be read ({why})")
    return UserError(f"{path}: cannot be read now ({why}); nothing was written over it")


def _is_section(section: object) -> bool:
    if not isinstance(section, list) or len(section) != 5 or not isinstance(section[1], str):
        return False
    name, kind, shape, *numbers = section
    sizes = [*shape, *numbers] if isinstance(shape, list) and len(shape) <= 8 else [-1]
    known = re.fullmatch(KINDS, kind) is not None
    return isinstance(name, str) and known and all(type(size) is int and 0 <= size < 1 << 48 for size in sizes)


def _array(
    stream: BufferedReader,
    start: int,
    block: NDArray[np.uint8],
    name: str,
    kind: str,
    shape: list[int],
    offset: int,
    checksum: int,
) -> NDArray:
    """Map an array after reading it once for its checksum: a disk error in a mapping would kill the process."""
    dtype = np.dtype(kind)
    size = dtype.itemsize * math.prod(shape)
    if not offset <= offset + size <= len(block):
        raise SnapshotError(f"does not describe itself ({name})")
    stream.seek(start + offset)
    left, found = size + padding(size), 0
    while left and (part := stream.read(min(left, 1 << 20))):
        left, found = left - len(part), crc32(part, found)
    if found != checksum:
        raise SnapshotError(f"is damaged (the checksum of {name} does not match)")
    return block[offset : offset + size].view(dtype).reshape(shape)


def _header_sum(header_bytes: int, body: bytes) -> int:
    return crc32(body, crc32(PREAMBLE.pack(MAGIC, FORMAT, 0, header_bytes)))
