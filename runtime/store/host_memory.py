"""The blocks that a store keeps in host memory: those used recently, and rows that are not in the file yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from edgevlm.runtime.store.block import Block, BlockRecord, joined, record_bytes


@dataclass(slots=True)
class Resident:
    """The part of one block in memory: all its rows, or None; and, in order, the records that are not in the file yet."""

    rows: Block | None = None
    unwritten: list[BlockRecord] = field(default_factory=list)

    @property
    def evictable(self) -> bool:
        """Whether ``rows`` takes memory of its own, and can be restored from the file and ``unwritten``."""
        return self.rows is not None and all(record.block is not self.rows for record in self.unwritten)

    @property
    def unwritten_bytes(self) -> int:
        return sum(record.nbytes for record in self.unwritten)

    @property
    def nbytes(self) -> int:
        own = record_bytes(self.rows) if self.evictable and self.rows is not None else 0
        return own + self.unwritten_bytes


class HostMemory:
    """Blocks by number, in the order of their use. used: bytes of all; unwritten: bytes that are not in the file.

    limit: in bytes; callers make room before they add.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.unwritten = 0
        self._resident: dict[int, Resident] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # numbers, the one used last at the end
        self._unwritten: OrderedDict[int, None] = OrderedDict()  # of blocks with unwritten records, the same way

    def find(self, number: int) -> Resident:
        """Return what is held of a block; an empty one for nothing."""
        return self._resident.get(number) or Resident()

    def use(self, number: int) -> Block | None:
        """Return all rows of a block if they are here, and mark it as used."""
        rows = self.find(number).rows
        if rows is not None:
            for order in (self._evictable, self._unwritten):
                if number in order:
                    order.move_to_end(number)
        return rows

    def put(self, number: int, record: BlockRecord) -> None:
        self._set(number, Resident(record.block, [record]))

    def append(self, number: int, record: BlockRecord) -> None:
        held = self.find(number)
        rows = None if held.rows is None else joined([held.rows, record.block])
        self._set(number, Resident(rows, [*held.unwritten, record]))

    def cache(self, number: int, block: Block) -> None:
        """Keep all rows of a block that were read from the file, if eviction makes room for them."""
        needed = record_bytes(block)
        while self.used + needed > self.limit:
            if not self.evict():
                return
        self._set(number, Resident(block, self.find(number).unwritten))

    def written(self, number: int, record: BlockRecord) -> bool:
        """Note that a record is in the file. Returns whether it was the block's last."""
        held = self.find(number)
        if record not in held.unwritten:
            return False
        rest = [other for other in held.unwritten if other is not record]
        self._set(number, Resident(held.rows, rest))
        return not rest

    def replace(self, number: int, count: int, record: BlockRecord) -> None:
        """Replace the records in the file and the first ``count`` unwritten ones by one."""
        held = self.find(number)
        rows = record.block if held.rows is not None and count == len(held.unwritten) else held.rows
        self._set(number, Resident(rows, [record, *held.unwritten[count:]]))

    def renumber(self, number: int, new: int) -> None:
        """Give a block another number and mark it as the least recently used."""
        held = self.find(number)
        self.drop(number)
        self._set(new, held)
        for order in (self._evictable, self._unwritten):
            if new in order:
                order.move_to_end(new, last=False)

    def drop(self, number: int) -> None:
        self._set(number, Resident())

    def evict(self) -> bool:
        """Drop the least recently used rows that can be restored. Returns whether there were any."""
        number = next(iter(self._evictable), None)
        if number is not None:
            self._set(number, Resident(None, self._resident[number].unwritten))
        return number is not None

    def unwritten_blocks(self) -> Iterator[int]:
        """Blocks with rows that are not in the file, least recently used first."""
        return iter(self._unwritten)

    def resident_blocks(self) -> Iterator[int]:
        """Blocks with all rows here, least recently used first, unwritten ones last."""
        return (
            number for order in (self._evictable, self._unwritten) for number in order if self.find(number).rows is not None
        )

    def _set(self, number: int, held: Resident) -> None:
        """Set what is held of a block, and mark it as used."""
        if (before := self._resident.pop(number, None)) is not None:
            self.used -= before.nbytes
            self.unwritten -= before.unwritten_bytes
            self._evictable.pop(number, None)
            self._unwritten.pop(number, None)
        if held.rows is None and not held.unwritten:
            return
        self.used += held.nbytes
        self.unwritten += held.unwritten_bytes
        self._resident[number] = held
        if held.evictable:
            self._evictable[number] = None
        if held.unwritten:
            self._unwritten[number] = None
