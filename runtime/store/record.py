"""A block as the file has it: a header of 64 bytes, then its arrays, each dense. docs/store.md draws the layout."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.block import Block

ALIGNMENT = 64
HEADER = struct.Struct("<4sHHqQqIIII16x")
# magic, dtype, axes, number, stamp, bytes of the record, heads, rows, head_dim, CRC-32 of the rest of header and record
MAGIC = b"EVBK"
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int8))
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_CHECKSUM = slice(44, 48)


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself. stamp: no two records have the same. nbytes: of the record, header and padding included."""

    dtype: int
    axes: int
    number: int
    stamp: int
    nbytes: int
    heads: int
    rows: int
    head_dim: int
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A block in a buffer that can be written as it is once it is sealed; the block's arrays are views of it."""

    buffer: NDArray[np.uint8]
    block: Block

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


def record_bytes(block: Block) -> int:
    """Bytes of the record of a block, header and padding included."""
    return _padded(HEADER.size + block.nbytes)


def copied(block: Block) -> Part:
    """A block copied into a buffer of its own, header still empty. Raises KeyError for a dtype that no cache has."""
    heads, rows, head_dim = block.key.shape
    buffer = np.empty(record_bytes(block), np.uint8)
    buffer[HEADER.size + block.nbytes :] = 0
    header = (_CODES[block.key.dtype], block.position.shape[2], 0, 0, buffer.nbytes, heads, rows, head_dim, 0)
    buffer[: HEADER.size] = np.frombuffer(HEADER.pack(MAGIC, *header), np.uint8)
    views = _views(buffer, Header(*header))
    for name in Block.__slots__:
        array = getattr(views, name)
        array[:] = getattr(block, name)
        array.flags.writeable = False
    return Part(buffer, views)


def seal(part: Part, number: int, stamp: int) -> None:
    """Give a part its number, its stamp and its checksum."""
    buffer = part.buffer
    buffer[8:24] = np.frombuffer(struct.pack("<qQ", number, stamp), np.uint8)
    buffer[_CHECKSUM] = 0
    buffer[_CHECKSUM] = np.frombuffer(struct.pack("<I", crc32(buffer.data)), np.uint8)


def header_of(data: bytes) -> Header | None:
    """The header at the start of ``data``, or None for what is none. What a checksum covers is not looked at."""
    if len(data) < HEADER.size or data[:4] != MAGIC:
        return None
    header = Header(*HEADER.unpack_from(data)[1:])
    return header if header.dtype < len(DTYPES) else None


def read(data: bytes, stamp: int) -> Block | None:
    """The block in a record, read-only views of ``data``; None where it is damaged or another one."""
    header = header_of(data)
    if header is None or (header.stamp, header.nbytes) != (stamp, len(data)):
        return None
    view = memoryview(data)
    rest = crc32(view[_CHECKSUM.stop :], crc32(bytes(4), crc32(view[: _CHECKSUM.start])))
    return _views(np.frombuffer(data, np.uint8), header) if rest == header.checksum else None


def _views(buffer: NDArray[np.uint8], header: Header) -> Block:
    """The arrays of a record. Widest numbers first, so that each lies where its dtype may."""
    shape, at = (header.heads, header.rows), HEADER.size

    def array(dtype: np.dtype, *more: int) -> NDArray:
        nonlocal at
        start, at = at, at + header.heads * header.rows * dtype.itemsize * prod(more)
        return buffer[start:at].view(dtype).reshape(*shape, *more)

    seq, frame = array(np.dtype(np.int64)), array(np.dtype(np.int32))
    position = array(np.dtype(np.int32), header.axes)
    row, col = array(np.dtype(np.int16)), array(np.dtype(np.int16))
    dtype = DTYPES[header.dtype]
    key, value = array(dtype, header.head_dim), array(dtype, header.head_dim)
    return Block(key, value, seq, frame, row, col, position)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
