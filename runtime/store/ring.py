"""The records of each block, and their places in the file: round and round, over the oldest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.block import ALIGNMENT, HEADER, header_of
from edgevlm.runtime.store.file import START, Extent, StoreFile

CROWDED = 0.75  # of the ring: with more in use the oldest blocks are lost; up to it, a byte written costs up to three more
MAX_RECORDS = 4  # records that a block has at most
MIN_ROWS = 64  # of a table
_RECORD = np.dtype([("number", np.int64), ("offset", np.int64), ("nbytes", np.int64), ("stamp", np.uint64)])
_REMOVED = -1  # instead of a count of records


class RecordTable:
    """Records in the order they were written. Each has an id, rising; the oldest leave first."""

    def __init__(self) -> None:
        self._rows = np.zeros(MIN_ROWS, _RECORD)
        self._begin = self._end = 0  # rows in use
        self._before = 0  # id of row 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def full(self) -> bool:
        """Whether :meth:`keep` has to come before the next :meth:`add`."""
        return self._end == len(self._rows)

    def keep(self, records: NDArray[np.int64]) -> None:
        """Keep only these ids, rising; they become 0, 1, and so on. Makes room for as many more."""
        rows = np.zeros(max(MIN_ROWS, 2 * len(records)), _RECORD)
        rows[: len(records)] = self._rows[records - self._before]
        self._rows, self._before, self._begin, self._end = rows, 0, 0, len(records)

    def add(self, number: int, extent: Extent) -> int:
        """Returns the record's id."""
        self._rows[self._end] = (number, extent.offset, extent.nbytes, extent.stamp)
        self._end += 1
        return self._before + self._end - 1

    def oldest(self, age: int = 0) -> tuple[int, int, int] | None:
        """Return (id, number, offset) of the oldest, or of the one ``age`` records younger; None if there is none."""
        at = self._begin + age
        if at >= self._end:
            return None
        row = self._rows[at]
        return self._before + at, int(row["number"]), int(row["offset"])

    def forget_oldest(self) -> None:
        self._begin += 1

    def belongs_to(self, record: int, number: int) -> None:
        self._rows[record - self._before]["number"] = number

    def extent(self, record: int) -> Extent:
        _, offset, nbytes, stamp = self._rows[record - self._before].item()
        return Extent(offset, nbytes, stamp)

    def arrays(self, records: NDArray[np.int64]) -> dict[str, NDArray]:
        """number, offset, nbytes and stamp of these, copies."""
        rows = self._rows[records - self._before]
        return {name: rows[name].copy() for name in _RECORD.fields or {}}


class BlockTable:
    """The records of each block, by number. Numbers come in rising order and leave in any."""

    def __init__(self) -> None:
        self._number = np.zeros(MIN_ROWS, np.int64)
        self._records_of = np.zeros((MIN_ROWS, MAX_RECORDS), np.int64)  # ids of records
        self._count = np.full(MIN_ROWS, _REMOVED, np.int8)
        self._used = 0  # rows that have had a block

    @property
    def nbytes(self) -> int:
        return self._number.nbytes + self._records_of.nbytes + self._count.nbytes

    def __contains__(self, number: int) -> bool:
        return self._find(number) >= 0

    def add(self, number: int) -> None:
        if self._used == len(self._number):
            self._resize(np.flatnonzero(self._count != _REMOVED))
        self._number[self._used] = number
        self._count[self._used] = 0
        self._used += 1

    def remove(self, number: int) -> None:
        self._count[self._find(number)] = _REMOVED

    def records_of(self, number: int) -> tuple[int, ...]:
        """Return the ids of a block's records, in the order of its rows. The block must be there."""
        at = self._find(number)
        return tuple(self._records_of[at, : self._count[at]].tolist())

    def extend(self, number: int, record: int) -> None:
        at = self._find(number)
        self._records_of[at, self._count[at]] = record
        self._count[at] += 1

    def clear(self, number: int) -> None:
        """Take a block's records from it."""
        self._count[self._find(number)] = 0

    def renumber_records(self, records: NDArray[np.int64]) -> None:
        """Rename the ids of all records, rising, to 0, 1, and so on."""
        self._records_of[: self._used] = records.searchsorted(self._records_of[: self._used])

    def ids(self) -> NDArray[np.int64]:
        """Of all blocks, rising."""
        return self._number[: self._used][self._count[: self._used] != _REMOVED]

    def records(self) -> NDArray[np.int64]:
        """Ids of the records of all blocks, rising: in the order they were written."""
        return np.sort(self._records_of[: self._used][np.arange(MAX_RECORDS) < self._count[: self._used, None]])

    def _find(self, number: int) -> int:
        at = int(self._number[: self._used].searchsorted(number))
        return at if at < self._used and self._number[at] == number and self._count[at] != _REMOVED else -1

    def _resize(self, keep: NDArray[np.int64]) -> None:
        """Room for twice the rows ``keep``, which come first."""
        self._used, rows = len(keep), max(MIN_ROWS, 2 * len(keep)) - len(keep)
        self._number = np.pad(self._number[keep], (0, rows))
        self._records_of = np.pad(self._records_of[keep], ((0, rows), (0, 0)))
        self._count = np.pad(self._count[keep], (0, rows), constant_values=_REMOVED)


class Ring:
    """The blocks, and their records in the file.

    Records follow each other from START; one that does not fit before ``limit`` goes to START again. ``head`` is the place
    of the next: records before it were written in this round, those after it in the last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // ALIGNMENT * ALIGNMENT
        self.blocks, self._records = BlockTable(), RecordTable()
        self.head = START
        self.live = 0  # bytes of the records that blocks have
        self._stamp = int.from_bytes(os.urandom(8), "little")  # so that no other life of this file has the same stamps

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self.blocks.nbytes + self._records.nbytes

    def extents(self, number: int) -> list[Extent]:
        """Return a block's records, in the order of its rows."""
        return [self._records.extent(record) for record in self.blocks.records_of(number)]

    def has_slack(self, nbytes: int, waiting: int) -> bool:
        """Whether blocks that a record of ``nbytes`` would overwrite can be written again first. waiting: bytes unwritten."""
        return self.live + waiting <= CROWDED * self._limit and nbytes <= (1 - CROWDED) * self._limit

    def ahead(self, nbytes: int) -> list[int]:
        """Return the blocks that a record of ``nbytes`` would overwrite, or leave behind at the ring's end."""
        wraps = self.head + nbytes > self._limit
        spans = [(self.head, self._limit), (START, START + nbytes)] if wraps else [(self.head, self.head + nbytes)]
        found: dict[int, None] = {}
        age = 0
        for begin, end in spans:
            while (old := self._records.oldest(age)) is not None and begin <= old[2] < end:
                record, number, _ = old
                if number in self.blocks and record in self.blocks.records_of(number):
                    found[number] = None
                age += 1
        return list(found)

    def renumber(self, number: int, new: int) -> None:
        """Give a block a new number, larger than all others; its records stay where they are."""
        records = self.blocks.records_of(number)
        self.blocks.remove(number)
        self.blocks.add(new)
        for record in records:
            self._records.belongs_to(record, new)
            self.blocks.extend(new, record)

    def remove(self, number: int) -> None:
        """Remove a block, which must be there."""
        self.clear(number)
        self.blocks.remove(number)

    def clear(self, number: int) -> None:
        """Take a block's records from it."""
        self.live -= sum(extent.nbytes for extent in self.extents(number))
        self.blocks.clear(number)

    def place(self, nbytes: int) -> tuple[Extent, list[int]] | None:
        """Make room at the head; None for a record larger than the ring.

        Returns the extent to write to, and the blocks that are lost: overwritten, or left behind at the ring's end.
        """
        if nbytes > self._limit - START:
            return None
        lost = []
        if self.head + nbytes > self._limit:
            lost = list(self._overwrite(self._limit))
            self.head = START
        lost += self._overwrite(self.head + nbytes)
        self._stamp = (self._stamp + 1) % 2**64
        return Extent(self.head, nbytes, self._stamp), lost

    def _overwrite(self, end: int) -> Iterator[int]:
        """Forget the records between the head and ``end``; the numbers of those whose blocks are gone with them."""
        while (oldest := self._records.oldest()) is not None and self.head <= oldest[2] < end:
            record, number, _ = oldest
            self._records.forget_oldest()
            if number in self.blocks and record in self.blocks.records_of(number):
                self.remove(number)
                yield number

    def written(self, number: int, extent: Extent) -> None:
        """A record is in its place; its block may have gone meanwhile."""
        self.head = extent.offset + extent.nbytes
        if number in self.blocks:
            self._extend(number, extent)

    def _extend(self, number: int, extent: Extent) -> None:
        if self._records.full:  # of what no block has any more, nothing needs to be known
            live = self.blocks.records()
            self._records.keep(live)
            self.blocks.renumber_records(live)
        self.blocks.extend(number, self._records.add(number, extent))
        self.live += extent.nbytes

    def state(self) -> dict[str, NDArray]:
        """Blocks, their records in the order they were written, and the head."""
        return {"head": np.array(self.head), "numbers": self.blocks.ids()} | self._records.arrays(self.blocks.records())

    def restore(self, state: Mapping[str, NDArray], file: StoreFile | None) -> list[int]:
        """Restore :meth:`state`; returns the numbers of blocks that are no longer whole in the file.

        Records written after that state are ignored. Raises KeyError or ValueError for an invalid state.
        """
        numbers = [int(number) for number in state["numbers"]]
        records = zip(*(state[name].tolist() for name in ("number", "offset", "nbytes", "stamp")), strict=True)
        found = [(number, Extent(offset, nbytes, stamp)) for number, offset, nbytes, stamp in records]
        head = int(state["head"])
        self.head = head if START <= head <= self._limit else START
        end = min(self._limit, file.nbytes if file is not None else 0)
        count = dict.fromkeys(numbers, 0)
        for number, _ in found:
            count[number] += 1
        if max(count.values(), default=0) > MAX_RECORDS:
            raise ValueError("a block has more records than it can have")
        lost = {number for number, records in count.items() if not records}
        lost |= {number for number, extent in found if extent.offset + extent.nbytes > end}
        there = [(number, extent) for number, extent in found if extent.offset + extent.nbytes <= end]
        lost |= _overwritten(file, head, there) if file is not None else set()
        for number in numbers:
            if number not in lost:
                self.blocks.add(number)
        for number, extent in found:
            if number not in lost:
                self._extend(number, extent)
        return sorted(lost)


def _overwritten(file: StoreFile, head: int, found: list[tuple[int, Extent]]) -> set[int]:
    """Return the blocks with a record overwritten since ``head`` was the head. found: numbers and records, oldest first.

    Records are overwritten oldest first, from the head to the file's end and from its start to the head: in either part the
    first that still has its stamp ends the search.
    """
    lost = set()
    for behind in (True, False):
        for number, extent in found:
            if (extent.offset >= head) == behind:
                if (header := header_of(file.read(Extent(extent.offset, HEADER.size, 0)))) and header.stamp == extent.stamp:
                    break
                lost.add(number)
    return lost
