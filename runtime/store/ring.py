"""Where records go in the file: round and round, over the oldest, and what is left of a file after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.file import START, Extent, StoreFile
from edgevlm.runtime.store.log import CHAIN, Blocks, Records
from edgevlm.runtime.store.record import ALIGNMENT, HEADER, header_of

CROWDED = 0.75  # of the ring: with more in use the oldest blocks are lost; up to it, a byte written costs up to three more


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is to be written. lost: blocks that it lies over, or that the ring leaves behind at its end."""

    extent: Extent
    lost: list[int]


class Ring:
    """The blocks that there are, and the records that they have.

    Records lie one behind the other from START; one that does not fit before ``limit`` goes to START again. ``head`` is where
    the next one goes: what lies before it was written since the ring last began anew, what lies behind it before that.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // ALIGNMENT * ALIGNMENT
        self.blocks, self._records = Blocks(), Records()
        self.head = START
        self.live = 0  # bytes of the records that blocks have
        self._stamp = int.from_bytes(os.urandom(8), "little")  # so that no other life of this file has the same stamps

    @property
    def nbytes(self) -> int:
        """Of the tables."""
        return self.blocks.nbytes + self._records.nbytes

    def extents(self, number: int) -> list[Extent]:
        """A block's records, in the order of its rows."""
        return [self._records.extent(record) for record in self.blocks.chain(number)]

    def has_slack(self, nbytes: int, waiting: int) -> bool:
        """Whether what a record of ``nbytes`` is put over can be written again at the head. waiting: bytes in no place yet.

        Then a round of the ring writes all blocks once, with less than a record left over at its end, and passes what is of no
        use: no block is come to twice for one that came.
        """
        return self.live + waiting <= CROWDED * self._limit and nbytes <= (1 - CROWDED) * self._limit

    def ahead(self, nbytes: int) -> list[int]:
        """Blocks that a record of ``nbytes`` would be put over, or leave behind at the ring's end."""
        wraps = self.head + nbytes > self._limit
        spans = [(self.head, self._limit), (START, START + nbytes)] if wraps else [(self.head, self.head + nbytes)]
        found: dict[int, None] = {}
        age = 0
        for begin, end in spans:
            while (old := self._records.oldest(age)) is not None and begin <= old[2] < end:
                record, number, _ = old
                if number in self.blocks and record in self.blocks.chain(number):
                    found[number] = None
                age += 1
        return list(found)

    def renumber(self, number: int, new: int) -> None:
        """A block that is there has another number, larger than all there were; its records lie where they lay."""
        chain = self.blocks.chain(number)
        self.blocks.remove(number)
        self.blocks.add(new)
        for record in chain:
            self._records.belongs_to(record, new)
            self.blocks.extend(new, record)

    def remove(self, number: int) -> None:
        """A block is gone. It must be there."""
        self.clear(number)
        self.blocks.remove(number)

    def clear(self, number: int) -> None:
        """A block's records are no longer its own."""
        self.live -= sum(extent.nbytes for extent in self.extents(number))
        self.blocks.clear(number)

    def place(self, nbytes: int) -> Place | None:
        """Make room for a record at the head; None for one that is larger than the ring."""
        if nbytes > self._limit - START:
            return None
        lost = []
        if self.head + nbytes > self._limit:
            lost = list(self._overwrite(self._limit))
            self.head = START
        lost += self._overwrite(self.head + nbytes)
        self._stamp = (self._stamp + 1) % 2**64
        return Place(Extent(self.head, nbytes, self._stamp), lost)

    def _overwrite(self, end: int) -> Iterator[int]:
        """Forget the records between the head and ``end``; the numbers of those whose blocks are gone with them."""
        while (oldest := self._records.oldest()) is not None and self.head <= oldest[2] < end:
            record, number, _ = oldest
            self._records.forget_oldest()
            if number in self.blocks and record in self.blocks.chain(number):
                self.remove(number)
                yield number

    def written(self, number: int, extent: Extent) -> None:
        """A record is in its place; its block may have gone meanwhile."""
        self.head = extent.offset + extent.nbytes
        if number in self.blocks:
            self._extend(number, extent)

    def _extend(self, number: int, extent: Extent) -> None:
        self.blocks.extend(number, self._records.add(number, extent))
        self.live += extent.nbytes

    def state(self) -> dict[str, NDArray]:
        """Blocks, their records in the order they were written, and the head."""
        return {"head": np.array(self.head), "numbers": self.blocks.numbers()} | self._records.arrays(self.blocks.records())

    def restore(self, state: Mapping[str, NDArray], file: StoreFile | None) -> list[int]:
        """Go on from :meth:`state`; the numbers of blocks that are no longer whole in the file.

        None of what a process wrote after that state and did not live to say is taken for anything; its room is used again.
        Raises KeyError or ValueError for what is no state.
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
        if max(count.values(), default=0) > CHAIN:
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
    """Numbers of blocks with records that were overwritten since ``head`` was the head; ``found``: numbers and records by age.

    The oldest go first, from the head to the file's end and from its start to the head: on both ways the first record that is
    still what it was ends them.
    """
    lost = set()
    for behind in (True, False):
        for number, extent in found:
            if (extent.offset >= head) == behind:
                if (header := header_of(file.read(Extent(extent.offset, HEADER.size, 0)))) and header.stamp == extent.stamp:
                    break
                lost.add(number)
    return lost
