"""The policy ReKV stores the complete history. Questions fetch the frames whose mean keys best match the mean query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime.policies.base import Float32, setting
from edgevlm.runtime.policies.retrieval import Chosen, Int64, QuestionRetrieval
from edgevlm.runtime.retrieval.working_set import unrotated_keys
from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


class FrameIndex(Stateful):
    """An index of frames, in temporal order. Each layer has up to ``capacity`` entries of ``entry_bytes`` bytes.

    An entry covers the frames ``[first, end)``. ``held``: how many of these frames are still stored. ``mean``: the mean of the
    frames' mean keys, ``[width]``. ``cost``: Ward's cost of merging an entry with the next, a b / (a + b) ||mean_a - mean_b||^2
    for a and b frames. When a layer is full, the two neighbours with the lowest cost merge; the oldest pair wins ties.
    """

    PARTS = ("mean", "first", "end", "held", "cost")

    state_fields = (*PARTS, "entries", "added", "merged")

    def __init__(self, layers: int, width: int, most_bytes: int) -> None:
        self.capacity = most_bytes // (layers * self.entry_bytes(width))
        self.mean = np.zeros((layers, self.capacity, width), np.float32)
        self.first, self.end, self.held = (np.zeros((layers, self.capacity), np.int32) for _ in range(3))
        self.cost = np.zeros((layers, self.capacity), np.float32)
        self.entries, self.added = np.zeros(layers, np.int64), np.zeros(layers, np.int64)  # ``added`` counts all frames so far
        self.merged = 0

    @staticmethod
    def entry_bytes(width: int) -> int:
        return 4 * width + 4 * 4

    def add(self, layer: int, mean: Float32) -> None:
        """Add the next frame of a layer. ``mean``: the frame's mean key, ``[width]``."""
        if self.entries[layer] == self.capacity:
            self._merge(layer, int(self.cost[layer, : self.capacity - 1].argmin()))
        at, number = int(self.entries[layer]), int(self.added[layer])
        self.mean[layer, at] = mean
        self.first[layer, at], self.end[layer, at], self.held[layer, at] = number, number + 1, 1
        self.entries[layer] += 1
        self.added[layer] += 1
        self._update_cost(layer, at - 1)

    def add_to_last(self, layer: int, mean: Float32, fraction: float) -> None:
        """Add rows to the newest frame. ``mean``: the new rows' mean key. ``fraction``: the fraction of the frame's rows that
        are new.
        """
        at = int(self.entries[layer]) - 1
        if at >= 0:
            self.mean[layer, at] += np.float32(fraction / self.held[layer, at]) * (mean - self.mean[layer, at])
            self._update_cost(layer, at - 1)

    def lose(self, layer: int, number: int) -> None:
        """Remove a lost frame, and its entry if the entry has no frame left."""
        at = int(np.searchsorted(self.first[layer, : self.entries[layer]], number, "right")) - 1
        if at >= 0 and number < self.end[layer, at]:
            self.held[layer, at] -= 1
            self.first[layer, at] += number == self.first[layer, at]
            if self.held[layer, at] == 0:
                self._remove(layer, at)
                self._update_cost(layer, at - 1)

    def best(self, layer: int, query: Float32, frames: int, each: int) -> Int64:
        """Return the numbers of up to ``frames`` frames, best first. ``query``: ``[width]``.

        Entries are ranked by the dot product of the query with their mean; on a tie the newer comes first. An entry contributes
        at most ``each`` frames, evenly spread.
        """
        count = int(self.entries[layer])
        score = self.mean[layer, :count] @ query
        order = np.lexsort((-np.arange(count), -score))[:frames]
        taken = [evenly_spaced(int(self.first[layer, at]), int(self.end[layer, at]), each) for at in order]
        return np.concatenate([*taken, np.zeros(0, np.int64)])[:frames]

    def _merge(self, layer: int, at: int) -> None:
        ours, theirs = self.held[layer, at], self.held[layer, at + 1]
        self.mean[layer, at] += np.float32(theirs / (ours + theirs)) * (self.mean[layer, at + 1] - self.mean[layer, at])
        self.end[layer, at] = self.end[layer, at + 1]
        self.held[layer, at] += theirs
        self._remove(layer, at + 1)
        self._update_cost(layer, at)
        self._update_cost(layer, at - 1)
        self.merged += 1

    def _remove(self, layer: int, at: int) -> None:
        self.entries[layer] -= 1
        last = int(self.entries[layer])
        for part in self.PARTS:
            entries = getattr(self, part)[layer]
            entries[at:last] = entries[at + 1 : last + 1]

    def _update_cost(self, layer: int, at: int) -> None:
        if 0 <= at < self.entries[layer] - 1:
            ours, theirs = self.held[layer, at : at + 2].tolist()  # int, because the product may be too large for int32
            apart = self.mean[layer, at] - self.mean[layer, at + 1]
            self.cost[layer, at] = ours * theirs / (ours + theirs) * float(apart @ apart)


def evenly_spaced(first: int, end: int, most: int) -> Int64:
    """Divide ``[first, end)`` into at most ``most`` equal intervals, and return their middles."""
    count = min(most, end - first)
    return first + (2 * np.arange(count, dtype=np.int64) + 1) * (end - first) // (2 * max(count, 1))


@dataclass
class ReKV(QuestionRetrieval):
    """Fetch, in each layer, the frames whose mean key has the largest dot product with the question's mean query.

    A frame's score is the sum over heads h of (mean of q_{h,i} over the question's rows i) . (mean of k_{h,j} over the frame's
    tokens j), both un-rotated. All heads of a layer fetch the same frames. New frames attend only to the window.

    Ours: the window, the index and the working set share one budget. When the fixed-size index is full, neighbouring entries
    merge. The mean query covers the whole prompt, not only the question.
    """

    frames: int = setting(64, "maximum number of frames that a question fetches per layer", at_least=1)
    each: int = setting(4, "maximum number of frames fetched per merged index entry", at_least=1)

    name: ClassVar[str] = "rekv"
    paper: ClassVar[str] = "ReKV, arXiv 2503.00540"
    state_fields = (*QuestionRetrieval.state_fields, "_frames", "_newest")

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._frames = FrameIndex(cache.layers, cache.kv_heads * cache.head_dim, self.index_bytes)
        if self._frames.capacity < 2:
            raise self.no_room("two frames")
        self._newest = np.full((cache.layers, 2), -1, np.int64)  # the last frame added, and its number of rows so far

    def take_in(self, blocks: Sequence[Block]) -> None:
        fresh = [self._add(layer, block) for layer, block in enumerate(blocks)]
        for of_frame in zip(*fresh, strict=True):  # this order makes a block's number frame * layers + layer
            for part in of_frame:
                self.store.put(part)

    def _add(self, layer: int, block: Block) -> list[Block]:
        means, fresh, layers = unrotated_keys(self.cache, layer, block), [], self.shape.layers
        starts = np.flatnonzero(np.diff(block.frame[0], prepend=-2)).tolist()
        for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
            frame, mean, part = int(block.frame[0, start]), means[:, start:end].mean(1).ravel(), block[start:end]
            if frame == self._newest[layer, 0]:
                self._newest[layer, 1] += end - start
                self._frames.add_to_last(layer, mean, (end - start) / self._newest[layer, 1])
                self.store.append((int(self._frames.added[layer]) - 1) * layers + layer, part)
            else:
                self._newest[layer] = frame, end - start
                self._frames.add(layer, mean)
                fresh.append(part)
        return fresh

    def forget_lost(self) -> None:
        for number in self.store.lost():
            self._frames.lose(number % self.shape.layers, number // self.shape.layers)
            self.lost += 1

    def rank(self, layer: int, query: Float32) -> Chosen:
        """Return the best frames' blocks, the same for every KV head."""
        heads, layers = self.cache.kv_heads, self.shape.layers
        most = min(self.frames, max(1, self.working_rows // self.shape.tokens_per_frame))
        asked = query.mean(1).reshape(heads, -1, query.shape[2]).sum(1)  # summed over each KV head's query heads
        best = self._frames.best(layer, asked.ravel(), most, self.each)
        return [[int(frame) * layers + layer for frame in best]] * heads

    @property
    def merged(self) -> int:
        """The number of index entries in all layers that were merged because the index was full."""
        return self._frames.merged
