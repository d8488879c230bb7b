"""Two tables that grow with what they hold: the records of the file by age, and the blocks by number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.file import Extent

CHAIN = 4  # records that a block has at most
LEAST = 64  # rows of a table
_RECORD = np.dtype([("number", np.int64), ("offset", np.int64), ("nbytes", np.int64), ("stamp", np.uint64)])
_GONE = -1  # instead of the length of a chain


class Records:
    """Records in the order they were written. Each has an id, from 0 up; the oldest leave first."""

    def __init__(self) -> None:
        self._rows = np.zeros(LEAST, _RECORD)
        self._begin = self._end = 0  # rows in use
        self._before = 0  # id of row 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def add(self, number: int, extent: Extent) -> int:
        """Returns the record's id."""
        if self._end == len(self._rows):
            rows = np.zeros(max(LEAST, 2 * len(self)), _RECORD)
            rows[: len(self)] = self._rows[self._begin : self._end]
            self._rows, self._before, self._begin, self._end = rows, self._before + self._begin, 0, len(self)
        self._rows[self._end] = (number, extent.offset, extent.nbytes, extent.stamp)
        self._end += 1
        return self._before + self._end - 1

    def oldest(self, age: int = 0) -> tuple[int, int, int] | None:
        """(id, number, offset) of the oldest, or of the one ``age`` records younger; None where there is none."""
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


class Blocks:
    """Which records each block has, by number. Numbers come in rising order and leave in any."""

    def __init__(self) -> None:
        self._number = np.zeros(LEAST, np.int64)
        self._chain = np.zeros((LEAST, CHAIN), np.int64)  # ids of records
        self._length = np.full(LEAST, _GONE, np.int8)
        self._used = self._held = 0  # rows that have had a block; blocks

    def __len__(self) -> int:
        return self._held

    @property
    def nbytes(self) -> int:
        return self._number.nbytes + self._chain.nbytes + self._length.nbytes

    def __contains__(self, number: int) -> bool:
        return self._find(number) >= 0

    def add(self, number: int) -> None:
        if self._used == len(self._number):
            self._resize(np.flatnonzero(self._length != _GONE))
        self._number[self._used] = number
        self._length[self._used] = 0
        self._used += 1
        self._held += 1

    def remove(self, number: int) -> None:
        self._length[self._find(number)] = _GONE
        self._held -= 1

    def chain(self, number: int) -> tuple[int, ...]:
        """Ids of a block's records, in the order of its rows. The block must be there."""
        at = self._find(number)
        return tuple(self._chain[at, : self._length[at]].tolist())

    def extend(self, number: int, record: int) -> None:
        at = self._find(number)
        self._chain[at, self._length[at]] = record
        self._length[at] += 1

    def clear(self, number: int) -> None:
        """The block's records are no longer its own."""
        self._length[self._find(number)] = 0

    def numbers(self) -> NDArray[np.int64]:
        """Of all blocks, rising."""
        return self._number[: self._used][self._length[: self._used] != _GONE]

    def records(self) -> NDArray[np.int64]:
        """Ids of the records of all blocks, rising: in the order they were written."""
        return np.sort(self._chain[: self._used][np.arange(CHAIN) < self._length[: self._used, None]])

    def _find(self, number: int) -> int:
        at = int(self._number[: self._used].searchsorted(number))
        return at if at < self._used and self._number[at] == number and self._length[at] != _GONE else -1

    def _resize(self, keep: NDArray[np.int64]) -> None:
        """Room for twice the rows ``keep``, which come first."""
        self._used, rows = len(keep), max(LEAST, 2 * len(keep)) - len(keep)
        self._number = np.pad(self._number[keep], (0, rows))
        self._chain = np.pad(self._chain[keep], ((0, rows), (0, 0)))
        self._length = np.pad(self._length[keep], (0, rows), constant_values=_GONE)
