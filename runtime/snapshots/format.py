"""Read and write a snapshot's file. It has a preamble, a JSON header and raw arrays, all with CRC-32. Nothing is pickled."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal
from zlib import crc32

import numpy as np
from annotated_types import Ge, Le, MaxLen
from numpy.typing import NDArray
from pydantic_core import from_json

from edgevlm import __version__
from edgevlm.errors import SnapshotError, first_problem
from edgevlm.runtime.stats import MemoryStats

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = 2
MAGIC = b"EDGEVLM\x1a"
PREAMBLE = struct.Struct("<8sIIQ")  # magic, format, the header's CRC-32, size of preamble and padded header
ALIGNMENT = 64
LARGEST_HEADER = 1 << 28

Arrays = Mapping[str, NDArray]
Size = Annotated[int, Ge(0), Le(1 << 48)]
Count = Annotated[int, Ge(0), Le(1 << 53)]
Index = Annotated[int, Ge(0), Le(1 << 30)]
Seconds = Annotated[float, Ge(-1e12), Le(1e12)]
Kind = Literal["|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]  # NumPy's type strings
Place = tuple[Index, Index | None, Index, Seconds]


class OtherFormat(SnapshotError):
    """The error for a snapshot made with a different version of edgevlm or of the bundle."""


class OtherSession(OtherFormat):
    """The error for a snapshot of a session with different settings."""


class Encrypted(OtherFormat):
    """The error for a snapshot that the given key cannot decrypt."""


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """The part of a snapshot's header that describes the stream.

    ``positions``: where the stream's positions continue; 4 numbers in early snapshots.
    """

    positions: Place | tuple[Index, Index | None, Index, Seconds, Index | None]
    seq: Count
    frames: Index
    stats: MemoryStats
    text_ids: Annotated[tuple[Index, ...], MaxLen(1 << 16)] = ()


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """How many frames of the unfinished chunk have arrived, and how many are encoded."""

    taken: Count
    encoded: Count


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """The part of a snapshot's header that describes the session.

    ``conversations``: (question, answer) pairs by conversation name.
    """

    frames: Count
    chunks: Count
    time_s: Seconds
    conversations: dict[str, list[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that :func:`edgevlm.runtime.snapshots.writer.identity` always returns."""

    model: str
    name: str
    policy: str
    budget: Count
    dtype: str
    chunk: Count
    reindexing: str


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """A snapshot's header.

    ``bytes``: the arrays' total size. ``sections``: each array's name, dtype, shape, offset and checksum. ``boot``: the
    operating system's boot id, and the seconds since boot when the snapshot was written.
    """

    edgevlm: str
    written: Annotated[float, Ge(0), Le(1e12)]
    source: str
    identity: Identity
    stream: StreamHeader
    chunk: ChunkHeader
    session: SessionHeader
    bytes: Size
    sections: tuple[tuple[str, Kind, Annotated[tuple[Size, ...], MaxLen(8)], Size, Size], ...]
    boot: tuple[str, Annotated[float, Ge(0), Le(1e12)]] = ("", 0.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A verified snapshot. ``about``: its header. ``arrays``: read-only views of the mapped file."""

    path: PurePath
    nbytes: int
    about: Mapping[str, Any]
    arrays: Arrays


def padding(size: int) -> int:
    return -size % ALIGNMENT


def parts(about: Mapping[str, Any], arrays: Arrays) -> Iterator[bytes | memoryview]:
    """Yield a snapshot's bytes in file order. ``about``: the header without ``bytes`` and ``sections``."""
    sections, offset, content = [], 0, list[bytes | memoryview]()
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        zeros = bytes(padding(raw.nbytes))
        kind = array.dtype.newbyteorder("<").str
        sections.append([name, kind, list(array.shape), offset, crc32(zeros, crc32(raw))])
        content += [raw, zeros]
        offset += raw.nbytes + len(zeros)
    text = json.dumps({**about, "bytes": offset, "sections": sections}, ensure_ascii=False).encode(errors="replace")
    header_bytes = PREAMBLE.size + len(text) + padding(PREAMBLE.size + len(text))
    body = text.ljust(header_bytes - PREAMBLE.size, b" ")
    yield PREAMBLE.pack(MAGIC, FORMAT, _header_sum(header_bytes, body), header_bytes) + body
    yield from content


def read(stream: BinaryIO, path: PurePath) -> Snapshot:
    """Read and verify a snapshot in a local file. Raises OSError, or a SnapshotError whose message does not name the file."""
    about, start = _read_header(stream)
    block = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[start:]
    arrays = {}
    for name, kind, shape, offset, checksum in about["sections"]:
        size = np.dtype(kind).itemsize * math.prod(shape)
        if offset + size > len(block):
            raise SnapshotError(f"has an invalid header ({name})")
        stream.seek(start + offset)
        left, found = size + padding(size), 0
        while left and (part := stream.read(min(left, 1 << 20))):  # a disk error in mapped memory would kill the process
            left, found = left - len(part), crc32(part, found)
        if found != checksum:
            raise SnapshotError(f"is damaged (the checksum of {name} does not match)")
        try:
            arrays[name] = block[offset : offset + size].view(kind).reshape(shape)
        except ValueError:  # the product of the sizes is too large for NumPy
            raise SnapshotError(f"has an invalid header ({name})") from None
    return Snapshot(path, start + len(block), about, arrays)


def _read_header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    start = stream.read(PREAMBLE.size)
    if len(start) < PREAMBLE.size or not start.startswith(MAGIC):
        raise SnapshotError("is not a snapshot, or is truncated")
    _, version, checksum, header_bytes = PREAMBLE.unpack(start)
    if version != FORMAT:
        upgrade = "; upgrade edgevlm" if version > FORMAT else ""
        raise OtherFormat(f"has snapshot format {version}, but this edgevlm supports {FORMAT}{upgrade}")
    body = stream.read(header_bytes - PREAMBLE.size) if PREAMBLE.size <= header_bytes <= LARGEST_HEADER else b""
    if _header_sum(header_bytes, body) != checksum:
        raise SnapshotError("is damaged (the checksum of its header does not match)")
    about, size = check_header(body), os.fstat(stream.fileno()).st_size
    if size != header_bytes + about["bytes"]:
        raise SnapshotError(f"has the wrong size ({size} bytes, not {header_bytes + about['bytes']})")
    return about, header_bytes


def check_header(body: bytes) -> dict[str, Any]:
    """Parse and validate a header's JSON. Raises SnapshotError, or OtherFormat if a different version wrote the header."""
    from pydantic import ValidationError

    try:
        about = from_json(body, allow_inf_nan=False)
        _schema().validate_json(body, strict=True)
    except ValidationError as error:
        why, version = first_problem(error), about.get("edgevlm") if isinstance(about, dict) else None
        if isinstance(version, str) and version != __version__:
            raise OtherFormat(f"was written by edgevlm {version[:40]}, but {__version__} cannot resume it ({why})") from None
        raise SnapshotError(f"has an invalid session header ({why})") from None
    except ValueError:
        raise SnapshotError("has an invalid header") from None
    return dict(about)


@cache
def _schema() -> TypeAdapter[SnapshotHeader]:
    from pydantic import TypeAdapter

    return TypeAdapter(SnapshotHeader)


def _header_sum(header_bytes: int, body: bytes) -> int:
    return crc32(body, crc32(PREAMBLE.pack(MAGIC, FORMAT, 0, header_bytes)))
