"""Mosaic's visual level: clusters of frames by what the tower saw, the partitions that keys are clustered in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native
from edgevlm.runtime.retrieval.cohesion import LEAST, RATE, Early, Float32, pooled, units
from edgevlm.runtime.stateful import Stateful

EARLY = 16  # frames whose variance sets the threshold
NEVER = 2**62  # a size that no cluster reaches


class Partitions(Stateful):
    """Up to ``slots`` clusters of pooled frame features ``[width]``, and the partition of each of the last frames.

    A partition is not split: that would mean to fetch all rows of its frames, of every layer. The frame that would take it
    over its threshold founds another instead. When there is no room, the two that are most alike become one. ``split`` says
    whether there may be more than one, small and large how many times the early variance the threshold is.
    """

    state_fields = ("mean", "variance", "size", "taken", "_of", "_early")

    def __init__(self, slots: int, width: int, frames: int, small: float, large: float, *, split: bool = True) -> None:
        self.slots, self._small, self._large, self._split = slots, small, large, split
        self.mean, self.variance = np.zeros((slots, width), np.float32), np.zeros(slots)
        self.size, self.taken = np.zeros(slots, np.int64), np.full(slots, -1, np.int32)  # taken: 0, or -1
        self._of = np.zeros(frames, np.int32)
        self._early = Early(1, width, EARLY)
        self.founded = self.merged = 0

    @staticmethod
    def slot_bytes(width: int) -> int:
        return 4 * width + 8 + 8 + 4

    def of(self, frames: NDArray[np.integer]) -> NDArray[np.int32]:
        """The partition of each of ``frames``, of those last taken in."""
        return self._of[frames % len(self._of)]

    def take(self, frames: NDArray[np.integer], features: Float32) -> list[tuple[int, int]]:
        """New frames, ``[n]``, and their features ``[n, width]``; returns what became one on the way: (which stays, gone)."""
        joined: list[tuple[int, int]] = []
        rows = np.ascontiguousarray(features, np.float32)
        for at, frame in enumerate(frames.tolist()):
            self._early.add(rows[None, at : at + 1])
            slot = self._assign(rows[at : at + 1], joined)
            self._of[frame % len(self._of)] = slot
        return joined

    def _assign(self, row: Float32, joined: list[tuple[int, int]]) -> int:
        slot, where = np.zeros(1, np.int32), np.zeros(1, np.int32)
        limit = self._early.threshold(self._small, self._large) if self._split and self.slots > 1 else None
        small, large, least = (limit.small, limit.large, LEAST) if limit else (0.0, 0.0, NEVER)
        table = (self.mean, self.variance, self.size, self.taken)
        stopped, _, _ = _native.mosaic_assign(row, where, 0, *table, small, large, RATE, least, slot)
        if stopped:
            self.founded += int(self.size[slot[0]] == 1)
            return int(slot[0])
        free = np.flatnonzero(self.taken < 0)
        at = int(free[0]) if len(free) else self._merge(joined)
        self.mean[at], self.variance[at], self.size[at], self.taken[at] = row[0], 0, 1, 0
        self.founded += 1
        return at

    def _merge(self, joined: list[tuple[int, int]]) -> int:
        """Make one of the two most alike; returns the slot that this leaves free."""
        into, gone = nearest_pairs(units(self.mean), np.zeros(self.slots, np.int32), 1)[0]
        pair = [into, gone]
        mean, variance = pooled(self.mean[pair].astype(np.float64), self.variance[pair], self.size[pair])
        self.mean[into], self.variance[into] = mean, variance
        self.size[into] += self.size[gone]
        self._of[self._of == gone] = into
        joined.append((into, gone))
        self.merged += 1
        return gone


def nearest_pairs(unit: NDArray[np.float64], label: NDArray[np.integer], count: int) -> list[tuple[int, int]]:
    """Up to ``count`` pairs of rows ``[n, width]`` of one label, the most alike first, none in two: (lower, higher) indices."""
    alike = np.where(np.triu(label[:, None] == label, 1), unit @ unit.T, -np.inf)
    order = np.argsort(-alike, axis=None, kind="stable")
    pairs: list[tuple[int, int]] = []
    used = np.zeros(len(unit), np.bool_)
    for flat in order:
        first, second = divmod(int(flat), len(unit))
        if len(pairs) == count or alike[first, second] == -np.inf:
            break
        if not used[first] and not used[second]:
            pairs.append((first, second))
            used[[first, second]] = True
    return pairs
