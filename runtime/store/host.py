"""The plainest store: everything in host memory, without a limit. What the others are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.block import Block, joined

if TYPE_CHECKING:
    from edgevlm.runtime.store import StoreStats


class HostStore:
    """See :class:`edgevlm.runtime.store.Store`. What it holds is in no state: it is lost with it."""

    file_bytes = 0
    index_bytes = 0
    host_limit = 0

    def __init__(self) -> None:
        from edgevlm.runtime.store import StoreStats

        self.stats: StoreStats = StoreStats()
        self._blocks: dict[int, Block] = {}
        self._next = 0
        self._lost: list[int] = []

    @property
    def host_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    def put(self, block: Block) -> int:
        self._blocks[self._next] = joined([block])  # a copy
        self._next += 1
        return self._next - 1

    def append(self, number: int, block: Block) -> bool:
        if number not in self._blocks:
            return False
        self._blocks[number] = joined([self._blocks[number], block])
        return True

    def renumber(self, numbers: Sequence[int]) -> range:
        found = [block for number in numbers if (block := self._blocks.pop(int(number), None)) is not None]
        new = range(self._next, self._next + len(found))
        self._blocks |= zip(new, found, strict=True)
        self._next = new.stop
        return new

    def resident(self, number: int) -> bool:
        return int(number) in self._blocks

    def expect(self, numbers: Sequence[int]) -> None:
        """All of it is here."""

    def get(self, numbers: Sequence[int]) -> list[Block | None]:
        found = [self._blocks.get(int(number)) for number in numbers]
        here = [block for block in found if block is not None]
        self.stats.hits += len(here)
        self.stats.bytes_host += sum(block.nbytes for block in here)
        return found

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._blocks.pop(int(number), None)

    def lost(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def state(self) -> Mapping[str, NDArray]:
        return {"next": np.array(self._next), "numbers": np.array(sorted(self._blocks), np.int64)}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        self._blocks, self._next = {}, int(state["next"])
        self._lost = state["numbers"].tolist()
        self.stats.lost += len(self._lost)

    def sync(self) -> None:
        """There is no disk."""

    def close(self) -> None:
        self._blocks = {}
