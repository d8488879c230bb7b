"""ReKV: the whole history below, and of it the frames whose mean key the question asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.policies.base import Bool, Float32
from edgevlm.runtime.policies.retrieval import Retrieval, block_of
from edgevlm.runtime.retrieval.frames import FrameIndex
from edgevlm.runtime.retrieval.stats import Phase
from edgevlm.runtime.retrieval.unrotated import per_kv_head, unrotated_keys
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class ReKV(Retrieval):
    """Fetch whole frames, those whose mean key has the largest dot product with the question's mean query, layer by layer.

    s_t = sum over heads h of mean over rows i of q_{h,i} . mean over the frame's tokens j of k_{h,j}, both un-rotated; all
    heads of a layer fetch the same frames. Frames are prefilled with the window alone.

    window: the share of |M| that the newest tokens are held in. index: the share of |M|, in bytes, that the mean keys take; the
    rest is the working set. frames: fetched by a question in each layer at the most, as far as the working set has room. each:
    frames at the most of an entry that many frames were merged into.

    Ours: shares of one budget; an index of fixed size, whose neighbouring entries merge when it is full; the query of the
    whole prompt, not of the question's words alone.
    """

    frames: int = 64
    each: int = 4

    name: ClassVar[str] = "rekv"
    paper: ClassVar[str] = "ReKV, arXiv 2503.00540"
    state_fields = (*Retrieval.state_fields, "_frames", "_newest", "lost")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1 or self.each < 1:
            raise ValueError("frames and each are 1 or more")

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._frames = FrameIndex(cache.layers, cache.kv_heads * cache.head_dim, self.index_bytes)
        if self._frames.capacity < 2:
            raise UserError(
                f"policy {self.name}: a budget of {self.budget} tokens leaves {self.index_bytes} bytes for the index, less "
                "than two frames; give a larger --budget, or index="
            )
        self._newest = np.full((cache.layers, 2), -1, np.int64)  # the frame that left last, and its rows that have
        self._leaving: list[list[Block]] = []  # frames of one compression, layer by layer
        self._chosen: list[list[int]] = [[] for _ in range(cache.layers)]  # by the question that is being answered
        self.lost = 0  # blocks that left the index, ever

    # Rows leave.

    def archive(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        rows = np.nonzero(leaving)[1].reshape(cache.kv_heads, -1)
        rows = np.take_along_axis(rows, np.argsort(np.take_along_axis(cache.seq(layer), rows, 1), 1), 1)
        block = block_of(cache, layer, rows)
        means = unrotated_keys(cache, layer, block)
        starts = np.flatnonzero(np.diff(block.frame[0], prepend=-2))
        fresh = []
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(block)], strict=True):
            frame, mean = int(block.frame[0, start]), means[:, start:end].mean(1).ravel()
            part = block[start:end]
            if frame == self._newest[layer, 0]:
                self._newest[layer, 1] += end - start
                self._frames.add_to_last(layer, mean, (end - start) / self._newest[layer, 1])
                self.store.append(self._number(layer, int(self._frames.added[layer]) - 1), part)
            else:
                self._newest[layer] = frame, end - start
                self._frames.add(layer, mean)
                fresh.append(part)
        self._leaving.append(fresh)
        if layer == cache.layers - 1:
            self._put()

    def _put(self) -> None:
        """Frame by frame, layer by layer: that is what a block's number says."""
        for of_frame in zip(*self._leaving, strict=True):
            for block in of_frame:
                self.store.put(block)
        self._leaving = []
        self.forget_lost()

    def forget_lost(self) -> None:
        for number in self.store.lost():
            self._frames.lose(number % self.shape.layers, number // self.shape.layers)
            self.lost += 1

    def _number(self, layer: int, frame: int) -> int:
        """Of the block that has a layer's rows of a frame."""
        return frame * self.shape.layers + layer

    # Rows are asked for.

    def choose(self, layer: int, query: Float32, phase: Phase) -> Sequence[Sequence[int]]:
        heads = self.cache.kv_heads
        if phase == "prefill" or not self._frames.entries[layer]:
            return [()] * heads
        if phase == "question":
            wanted = per_kv_head(self.unrotated(query), heads).ravel()
            most = min(self.frames, max(1, self.working_rows // self.shape.tokens_per_frame))
            self._chosen[layer] = [self._number(layer, int(t)) for t in self._frames.best(layer, wanted, most, self.each)]
        return [self._chosen[layer]] * heads

    @property
    def merged(self) -> int:
        """Entries of the index that were merged into another because it was full, in all layers."""
        return self._frames.merged
