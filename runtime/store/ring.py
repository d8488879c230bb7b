"""Where records go in the file: round and round, over the oldest, and what is left of a file after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.file import START, Extent, StoreFile
from edgevlm.runtime.store.log import CHAIN, Blocks, Records
from edgevlm.runtime.store.record import ALIGNMENT, HEADER, PADDING, header_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is to be written. padding: where the ring is left for its start, if it is. lost: blocks overwritten."""

    extent: Extent
    padding: Extent | None
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
        self._stamp = int.from_bytes(os.urandom(8), "little")  # so that no other life of this file has the same stamps

    @property
    def nbytes(self) -> int:
        """Of the tables."""
        return self.blocks.nbytes + self._records.nbytes

    def extents(self, number: int) -> list[Extent]:
        """A block's records, in the order of its rows."""
        return [self._records.extent(record) for record in self.blocks.chain(number)]

    def place(self, nbytes: int) -> Place | None:
        """Make room for a record at the head; None for one that is larger than the ring."""
        if nbytes > self._limit - START:
            return None
        lost, padding = [], None
        if self.head + nbytes > self._limit:
            lost = list(self._overwrite(self._limit))
            if self.head < self._limit:
                padding = Extent(self.head, self._limit - self.head, self._next_stamp())
            self.head = START
        lost += self._overwrite(self.head + nbytes)
        return Place(Extent(self.head, nbytes, self._next_stamp()), padding, lost)

    def _overwrite(self, end: int) -> Iterator[int]:
        """Forget the records between the head and ``end``; the numbers of those whose blocks are gone with them."""
        while (oldest := self._records.oldest()) is not None and self.head <= oldest[2] < end:
            record, number, _ = oldest
            self._records.forget_oldest()
            if number in self.blocks and record in self.blocks.chain(number):
                self.blocks.remove(number)
                yield number

    def written(self, number: int, extent: Extent) -> None:
        """A record is in its place; its block may have gone meanwhile."""
        self.head = extent.offset + extent.nbytes
        if number in self.blocks:
            self.blocks.extend(number, self._records.add(number, extent))

    def _next_stamp(self) -> int:
        self._stamp = (self._stamp + 1) % 2**64
        return self._stamp

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
        gone = _overwritten(file, head, found) if file is not None else []
        end = min(self._limit, file.nbytes if file is not None else 0)
        whole: dict[int, list[Extent]] = {number: [] for number in numbers}
        lost = set()
        for number, extent in found:
            whole[number].append(extent)
            covered = any(first < extent.offset + extent.nbytes and extent.offset < last for first, last in gone)
            if covered or extent.offset + extent.nbytes > end or len(whole[number]) > CHAIN:
                lost.add(number)
        lost |= {number for number, extents in whole.items() if not extents}
        for number in numbers:
            if number not in lost:
                self.blocks.add(number)
        for number, extent in found:
            if number not in lost:
                self.blocks.extend(number, self._records.add(number, extent))
        return sorted(lost)


def _overwritten(file: StoreFile, head: int, found: list[tuple[int, Extent]]) -> list[tuple[int, int]]:
    """Ranges of the file that were written from ``head`` on after it was the head, and what was already of no use.

    Records follow each other, so the first that is still what the state says, or that is none, ends them.
    """
    stamps = {extent.offset: extent.stamp for _, extent in found}
    ranges: list[tuple[int, int]] = []
    at, passed = head, 0
    while passed < file.nbytes:
        at = at if at < file.nbytes else START
        header = header_of(file.start_of(at, HEADER.size))
        if header is None or stamps.get(at) == header.stamp:
            break
        start = ranges.pop()[0] if ranges and ranges[-1][1] == at else at
        ranges.append((start, at + header.nbytes))
        passed += header.nbytes
        at = START if header.kind == PADDING else at + header.nbytes
    return ranges
