"""ReKV: the complete history in a store, and of it the frames whose mean key the question asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime.policies.base import Float32, setting
from edgevlm.runtime.policies.retrieval import QuestionRetrieval
from edgevlm.runtime.retrieval.frame_index import FrameIndex
from edgevlm.runtime.retrieval.working_set import per_kv_head, unrotated_keys
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class ReKV(QuestionRetrieval):
    """Fetch the frames whose mean key has the largest dot product with the question's mean query, in each layer.

    s_t = sum over heads h of mean over rows i of q_{h,i} . mean over the frame's tokens j of k_{h,j}, both un-rotated; all
    heads of a layer fetch the same frames. Frames are prefilled with the window alone.

    Ours: window, index and working set share one budget; the index has a fixed size, and neighbouring entries merge when it is
    full; the query is the entire prompt's, not only the question's words.
    """

    frames: int = setting(64, "most frames that a question fetches per layer", at_least=1)
    each: int = setting(4, "most frames to fetch of a merged index entry", at_least=1)

    name: ClassVar[str] = "rekv"
    paper: ClassVar[str] = "ReKV, arXiv 2503.00540"
    state_fields = (*QuestionRetrieval.state_fields, "_frames", "_newest")

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._frames = FrameIndex(cache.layers, cache.kv_heads * cache.head_dim, self.index_bytes)
        self.check_index(self._frames.capacity, "frames")
        self._newest = np.full((cache.layers, 2), -1, np.int64)  # the frame that left last, and its rows that have

    def take_in(self, blocks: Sequence[Block]) -> None:
        fresh = [self._add(layer, block) for layer, block in enumerate(blocks)]
        for of_frame in zip(*fresh, strict=True):  # frame by frame, layer by layer: that is what a block's number says
            for part in of_frame:
                self.store.put(part)

    def _add(self, layer: int, block: Block) -> list[Block]:
        """Bring rows of a layer into the index; returns those of frames that the store does not have yet, frame by frame."""
        means, fresh = unrotated_keys(self.cache, layer, block), []
        starts = np.flatnonzero(np.diff(block.frame[0], prepend=-2)).tolist()
        for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
            frame, mean, part = int(block.frame[0, start]), means[:, start:end].mean(1).ravel(), block[start:end]
            if frame == self._newest[layer, 0]:
                self._newest[layer, 1] += end - start
                self._frames.add_to_last(layer, mean, (end - start) / self._newest[layer, 1])
                self.store.append(self._number(layer, int(self._frames.added[layer]) - 1), part)
            else:
                self._newest[layer] = frame, end - start
                self._frames.add(layer, mean)
                fresh.append(part)
        return fresh

    def forget_lost(self) -> None:
        for number in self.store.lost():
            self._frames.lose(number % self.shape.layers, number // self.shape.layers)
            self.lost += 1

    def _number(self, layer: int, frame: int) -> int:
        """Of the block that has a layer's rows of a frame."""
        return frame * self.shape.layers + layer

    def rank(self, layer: int, query: Float32) -> Sequence[Sequence[int]]:
        """The same blocks for every KV head."""
        heads = self.cache.kv_heads
        most = min(self.frames, max(1, self.working_rows // self.shape.tokens_per_frame))
        best = self._frames.best(layer, per_kv_head(query, heads).ravel(), most, self.each)
        return [[self._number(layer, int(frame)) for frame in best]] * heads

    @property
    def merged(self) -> int:
        """Entries of the index that were merged into another because it was full, in all layers."""
        return self._frames.merged
