"""Define a block (the rows of one cluster in one layer) and the record that holds a block in the store's file."""

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
_MOST = 1 << 16  # limit on heads and head_dim: NumPy refuses shapes of more than 2**63 bytes, even for zero rows


@dataclass(frozen=True, slots=True)
class Block:
    """A group of n rows in one layer, either of one KV head (H is 1) or of all KV heads of the model.

    ``key``, ``value``: ``[H, n, head_dim]`` in the cache's dtype. ``position``: ``[H, n, axes]``. All other arrays are
    ``[H, n]``. Keys are rotated to their positions, as in the cache. The values of ``confirmed`` in a block are not updated.
    ``block[rows]`` holds views of the arrays if ``rows`` is a slice, and copies otherwise.
    """

    key: NDArray[np.number]
    value: NDArray[np.number]
    seq: NDArray[np.int64]
    frame: NDArray[np.int32]
    row: NDArray[np.int16]
    col: NDArray[np.int16]
    position: NDArray[np.int32]
    confirmed: NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.seq.shape[1])

    def __getitem__(self, rows: slice | NDArray[Any]) -> Block:
        return Block(*[part[:, rows] for part in self.parts])

    @property
    def parts(self) -> tuple[NDArray, ...]:
        """The block's arrays, in the order of its fields."""
        return self.key, self.value, self.seq, self.frame, self.row, self.col, self.position, self.confirmed

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def head(self, head: int) -> Block:
        """Return a block with views of one KV head's rows, or the block itself if it has only one head."""
        return self if len(self.seq) == 1 else Block(*[part[head : head + 1] for part in self.parts])


def joined(blocks: Sequence[Block]) -> Block:
    """Return one block with copies of all rows of the given blocks, in order. The blocks must be of the same KV heads."""
    return Block(*[np.concatenate(parts, 1) for parts in zip(*(block.parts for block in blocks), strict=True)])


class RecordHeader(NamedTuple):
    """The header of a record.

    ``stamp``: a number that is unique to each write. ``nbytes``: the record's size, including header and padding.
    """

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
    """A block and the buffer that holds its arrays. Once :meth:`seal` is called, the buffer can be written to the file."""

    buffer: NDArray[np.uint8]
    block: Block

    @staticmethod
    def of(block: Block) -> BlockRecord:
        """Return a record with a copy of ``block``. Raises ValueError for a dtype other than those in DTYPES."""
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
        """Write the block's number, the stamp and the checksum into the header."""
        self.buffer[8:24] = np.frombuffer(struct.pack("<qQ", number, stamp), np.uint8)
        self.buffer[_CHECKSUM] = 0
        self.buffer[_CHECKSUM] = np.frombuffer(struct.pack("<I", crc32(self.buffer.data)), np.uint8)


def record_bytes(block: Block) -> int:
    """Return the size in bytes of a block's record, including header and padding."""
    return -(-(HEADER.size + block.nbytes) // ALIGNMENT) * ALIGNMENT


def header_of(data: bytes) -> RecordHeader | None:
    """Return the header at the start of a record without verifying its checksum, or None if there is no header."""
    if len(data) < HEADER.size:
        return None
    header = RecordHeader(*HEADER.unpack_from(data))
    return header if header.magic == MAGIC and header.dtype < len(DTYPES) else None


def read_record(data: bytes, stamp: int) -> Block | None:
    """Return a record's block, or None if the record is damaged or has a different stamp.

    The block's arrays are read-only views of ``data``.
    """
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
    """Return views of a record's arrays, which are ordered so that each array is aligned to its dtype."""
    shape, at = (header.heads, header.rows), HEADER.size

    def array(dtype: type[np.generic] | np.dtype, *more: int) -> NDArray:
        nonlocal at
        start, at = at, at + header.heads * header.rows * np.dtype(dtype).itemsize * prod(more)
        return buffer[start:at].view(dtype).reshape(*shape, *more)

    seq, frame, confirmed, position = array(np.int64), array(np.int32), array(np.int32), array(np.int32, header.axes)
    row, col = array(np.int16), array(np.int16)
    key, value = (array(DTYPES[header.dtype], header.head_dim) for _ in range(2))
    return Block(key, value, seq, frame, row, col, position, confirmed)
