"""A block: the rows of one cluster of one layer, contiguous, in memory and as a record of the file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
HEADER = struct.Struct("<4sHHqQqIIII16x")
MAGIC = b"EVB2"
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int8))
_CHECKSUM = slice(44, 48)
_MOST = 1 << 16  # heads, and numbers of one: numpy refuses shapes of more than 2**63 bytes even where there is no row


@dataclass(frozen=True, slots=True)
class Block:
    """n rows of one layer, of one KV head or of all: H is 1 or the model's KV heads.

    Keys are rotated to ``position`` and stored as the cache stores them. ``block[rows]``: views for a slice, else copies.
    """

    key: NDArray[np.number]  # [H, n, head_dim], of the cache's dtype
    value: NDArray[np.number]  # [H, n, head_dim]
    seq: NDArray[np.int64]  # [H, n]
    frame: NDArray[np.int32]  # [H, n]
    row: NDArray[np.int16]  # [H, n]
    col: NDArray[np.int16]  # [H, n]
    position: NDArray[np.int32]  # [H, n, axes]
    confirmed: NDArray[np.int32]  # [H, n]: as of when the rows left the device

    def __len__(self) -> int:
        return int(self.seq.shape[1])

    def __getitem__(self, rows: slice | NDArray[Any]) -> Block:
        return Block(*[part[:, rows] for part in self.parts])

    @property
    def parts(self) -> tuple[NDArray, ...]:
        """The arrays, in the order above."""
        return self.key, self.value, self.seq, self.frame, self.row, self.col, self.position, self.confirmed

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def head(self, head: int) -> Block:
        """Return views of the rows of one KV head as a block. A block of one head returns itself for every head."""
        return self if len(self.seq) == 1 else Block(*[part[head : head + 1] for part in self.parts])


def joined(blocks: Sequence[Block]) -> Block:
    """Return blocks of the same heads as one, in their order: a copy."""
    return Block(*[np.concatenate(parts, 1) for parts in zip(*(block.parts for block in blocks), strict=True)])


class RecordHeader(NamedTuple):
    """The header of a record. stamp: unique. nbytes: size of the record, header and padding included. checksum: CRC-32."""

    magic: bytes
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
class BlockRecord:
    """A block in a buffer that can be written once it is sealed; the block's arrays are read-only views of it."""

    buffer: NDArray[np.uint8]
    block: Block

    @staticmethod
    def of(block: Block) -> BlockRecord:
        """Copy a block. Raises ValueError for a dtype that no cache has."""
        heads, rows, head_dim = block.key.shape
        buffer = np.empty(record_bytes(block), np.uint8)
        buffer[HEADER.size + block.nbytes :] = 0
        dtype, axes = DTYPES.index(block.key.dtype), block.position.shape[2]
        header = RecordHeader(MAGIC, dtype, axes, 0, 0, buffer.nbytes, heads, rows, head_dim, 0)
        buffer[: HEADER.size] = np.frombuffer(HEADER.pack(*header), np.uint8)
        views = _views(buffer, header)
        for view, part in zip(views.parts, block.parts, strict=True):
            view[:] = part
            view.flags.writeable = False
        return BlockRecord(buffer, views)

    def seal(self, number: int, stamp: int) -> None:
        """Write the block's number, a stamp and the checksum into the header."""
        self.buffer[8:24] = np.frombuffer(struct.pack("<qQ", number, stamp), np.uint8)
        self.buffer[_CHECKSUM] = 0
        self.buffer[_CHECKSUM] = np.frombuffer(struct.pack("<I", crc32(self.buffer.data)), np.uint8)


def record_bytes(block: Block) -> int:
    """Return the bytes of a block's record, header and padding included."""
    return -(-(HEADER.size + block.nbytes) // ALIGNMENT) * ALIGNMENT


def header_of(data: bytes) -> RecordHeader | None:
    """Return the header at the start of ``data``, or None if there is none; does not verify the checksum."""
    if len(data) < HEADER.size:
        return None
    header = RecordHeader(*HEADER.unpack_from(data))
    return header if header.magic == MAGIC and header.dtype < len(DTYPES) else None


def read_record(data: bytes, stamp: int) -> Block | None:
    """Return the block in a record as read-only views of ``data``; None if it is damaged or another record."""
    header = header_of(data)
    if header is None or (header.stamp, header.nbytes) != (stamp, len(data)):
        return None
    row = 20 + 4 * header.axes + 2 * header.head_dim * DTYPES[header.dtype].itemsize
    if HEADER.size + header.heads * header.rows * row > len(data) or max(header.heads, header.head_dim) > _MOST:
        return None
    view = memoryview(data)
    rest = crc32(view[_CHECKSUM.stop :], crc32(bytes(4), crc32(view[: _CHECKSUM.start])))
    return _views(np.frombuffer(data, np.uint8), header) if rest == header.checksum else None


def _views(buffer: NDArray[np.uint8], header: RecordHeader) -> Block:
    """Return the arrays of a record, the widest numbers first, so that each is aligned to its dtype."""
    shape, at = (header.heads, header.rows), HEADER.size

    def array(dtype: type[np.generic] | np.dtype, *more: int) -> NDArray:
        nonlocal at
        start, at = at, at + header.heads * header.rows * np.dtype(dtype).itemsize * prod(more)
        return buffer[start:at].view(dtype).reshape(*shape, *more)

    seq, frame, confirmed, position = array(np.int64), array(np.int32), array(np.int32), array(np.int32, header.axes)
    row, col = array(np.int16), array(np.int16)
    key, value = (array(DTYPES[header.dtype], header.head_dim) for _ in range(2))
    return Block(key, value, seq, frame, row, col, position, confirmed)
