"""ReKV's index: one mean key for each frame and, once it is full, for each stretch of similar frames."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.stateful import Stateful

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

PARTS = ("mean", "first", "end", "held", "cost")


class FrameIndex(Stateful):
    """Per layer up to ``capacity`` entries in temporal order, allocated once, ``entry_bytes`` each.

    An entry is the frames ``[first, end)``, ``held`` of which are not lost, and the mean of their means ``[width]``. When a
    layer is full, the neighbours with the lowest cost merge, of equal ones the oldest; ``merged`` counts them. cost: of merging
    an entry with the next, a b / (a + b) ||mean_a - mean_b||^2 for a and b frames (Ward).
    """

    state_fields = (*PARTS, "entries", "added", "merged")

    def __init__(self, layers: int, width: int, most_bytes: int) -> None:
        self.capacity = most_bytes // (layers * self.entry_bytes(width))
        self.mean = np.zeros((layers, self.capacity, width), np.float32)
        self.first, self.end, self.held = (np.zeros((layers, self.capacity), np.int32) for _ in range(3))
        self.cost = np.zeros((layers, self.capacity), np.float32)
        self.entries = np.zeros(layers, np.int64)
        self.added = np.zeros(layers, np.int64)  # frames, ever
        self.merged = 0

    @staticmethod
    def entry_bytes(width: int) -> int:
        """Of one entry of one layer."""
        return 4 * width + 4 * 4

    def add(self, layer: int, mean: Float32) -> int:
        """The next frame of a layer, ``[width]``; returns its number."""
        if self.entries[layer] == self.capacity:
            self._merge(layer, int(self.cost[layer, : self.capacity - 1].argmin()))
        at, number = int(self.entries[layer]), int(self.added[layer])
        self.mean[layer, at] = mean
        self.first[layer, at], self.end[layer, at], self.held[layer, at] = number, number + 1, 1
        self.entries[layer] += 1
        self.added[layer] += 1
        self._cost(layer, at - 1)
        return number

    def add_to_last(self, layer: int, mean: Float32, fraction: float) -> None:
        """More of the newest frame: ``mean`` of those rows, which are ``fraction`` of what it has now."""
        at = int(self.entries[layer]) - 1
        if at >= 0:
            self.mean[layer, at] += np.float32(fraction / self.held[layer, at]) * (mean - self.mean[layer, at])
            self._cost(layer, at - 1)

    def lose(self, layer: int, number: int) -> None:
        """A frame is no longer there; an entry goes with its last."""
        count = int(self.entries[layer])
        at = int(np.searchsorted(self.first[layer, :count], number, "right")) - 1
        if at < 0 or number >= self.end[layer, at]:
            return
        self.held[layer, at] -= 1
        self.first[layer, at] += number == self.first[layer, at]
        if self.held[layer, at] == 0:
            self._remove(layer, at)
            self._cost(layer, at - 1)

    def best(self, layer: int, query: Float32, frames: int, each: int) -> Int64:
        """Numbers of up to ``frames`` frames, best first: by the dot product of ``query`` ``[width]`` with their entry's mean.

        Of equal entries the newer is first. Of an entry ``each`` frames at the most, evenly spread.
        """
        count = int(self.entries[layer])
        score = self.mean[layer, :count] @ query
        order = np.lexsort((-np.arange(count), -score))[:frames]
        taken = [evenly_spaced(int(self.first[layer, at]), int(self.end[layer, at]), each) for at in order]
        return np.concatenate([*taken, np.zeros(0, np.int64)])[:frames]

    def _merge(self, layer: int, at: int) -> None:
        """Entry ``at`` takes in the one after it."""
        ours, theirs = self.held[layer, at], self.held[layer, at + 1]
        self.mean[layer, at] += np.float32(theirs / (ours + theirs)) * (self.mean[layer, at + 1] - self.mean[layer, at])
        self.end[layer, at] = self.end[layer, at + 1]
        self.held[layer, at] += theirs
        self._remove(layer, at + 1)
        self._cost(layer, at)
        self._cost(layer, at - 1)
        self.merged += 1

    def _remove(self, layer: int, at: int) -> None:
        count = int(self.entries[layer])
        for part in PARTS:
            entries = getattr(self, part)[layer]
            entries[at : count - 1] = entries[at + 1 : count]
        self.entries[layer] -= 1

    def _cost(self, layer: int, at: int) -> None:
        """Of merging ``at`` with its neighbour, where both are there."""
        if 0 <= at < self.entries[layer] - 1:
            ours, theirs = self.held[layer, at : at + 2].tolist()  # their product may be too large for 32 bits
            apart = self.mean[layer, at] - self.mean[layer, at + 1]
            self.cost[layer, at] = ours * theirs / (ours + theirs) * float(apart @ apart)


def evenly_spaced(first: int, end: int, most: int) -> Int64:
    """``most`` numbers of ``[first, end)`` at even distances, or all of them: the middle of each of as many parts."""
    count = min(most, end - first)
    return first + (2 * np.arange(count, dtype=np.int64) + 1) * (end - first) // (2 * max(count, 1))
