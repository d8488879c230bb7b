"""A block: the rows of one cluster of one layer, contiguous, as the store keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Block:
    """n rows of one layer, of one KV head or of all: H is 1 or the model's KV heads.

    Keys are rotated to ``position`` and stored as the cache stores them, int8 codes included.
    """

    key: NDArray[np.number]  # [H, n, head_dim], of the cache's dtype
    value: NDArray[np.number]  # [H, n, head_dim]
    seq: NDArray[np.int64]  # [H, n]
    frame: NDArray[np.int32]  # [H, n]
    row: NDArray[np.int16]  # [H, n]
    col: NDArray[np.int16]  # [H, n]
    position: NDArray[np.int32]  # [H, n, axes]

    def __len__(self) -> int:
        return int(self.seq.shape[1])

    @property
    def parts(self) -> tuple[NDArray, ...]:
        """Its arrays, in the order above."""
        return self.key, self.value, self.seq, self.frame, self.row, self.col, self.position

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def head(self, head: int) -> Block:
        """The rows of one KV head, as a block of one: views. A block of one head is every head's."""
        if len(self.seq) == 1:
            return self
        return Block(*[part[head : head + 1] for part in self.parts])

    def first(self, rows: int) -> Block:
        """Its first ``rows`` rows: views."""
        return self.between(0, rows)

    def at(self, rows: NDArray[np.int64]) -> Block:
        """Its rows of these places ``[m]``: copies."""
        return Block(*[part[:, rows] for part in self.parts])

    def between(self, start: int, end: int) -> Block:
        """Its rows ``[start, end)``: views."""
        return Block(*[part[:, start:end] for part in self.parts])


def joined(blocks: list[Block]) -> Block:
    """Blocks of the same heads as one, in their order."""
    return Block(*[np.concatenate(parts, 1) for parts in zip(*(block.parts for block in blocks), strict=True)])
