"""ReSV, the retrieval of V-Rex: Real-Time Streaming Video LLM Acceleration via Dynamic KV Cache Retrieval, sec. IV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import Appended, Bool, Float32, setting
from edgevlm.runtime.policies.retrieval import Int32, Retrieval, block_of, by_seq, row_bytes
from edgevlm.runtime.retrieval.cluster_pages import ClusterPages
from edgevlm.runtime.retrieval.hash_clusters import BITS, MIN_SLOTS, HashClusters, RowClusters
from edgevlm.runtime.retrieval.working_set import Phase, rotate
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class ReSV(Retrieval):
    """Cluster keys by hash bits; fetch the fewest clusters that hold a given fraction of each row's attention.

    bit p = (key . plane p > 0); a token joins the nearest open cluster within a Hamming distance, else founds one. WiCSum: per
    query row clusters in descending order of softmax(q K_cluster^T / sqrt D) until score times tokens passes a fraction of
    the row's sum.

    Ours: a layer's own query decides. Scores are a row's softmax, because raw products may be negative. The window is always
    attended to; its clusters count in the sum and need no fetch. A KV head fetches the union over the rows of all its query
    heads. Rows that leave the window are sealed as separate clusters.
    """

    distance: int = setting(7, "most bits by which a token may differ from its cluster; the paper's Th_hp less 1", at_least=0)
    threshold: float = setting(0.3, "fraction of a row's attention that clusters must exceed, Th_r-wics", at_least=0, below=1)

    name: ClassVar[str] = "resv"
    paper: ClassVar[str] = "V-Rex, sec. IV"
    state_fields = (*Retrieval.state_fields, "clusters", "pages", "row_clusters")
    _scratch_fields = (*Retrieval._scratch_fields, "_middle")

    def open(self, cache: KVCache, store: Store) -> None:
        """Raises UserError for an index that has no room for a few clusters."""
        super().open(cache, store)
        layers, heads, width, axes = cache.layers, cache.kv_heads, cache.head_dim, cache.axes
        fixed = heads * width * BITS + self.window_rows * RowClusters.row_bytes(layers, heads)
        of_all = layers * heads * (HashClusters.slot_bytes(width, axes) + ClusterPages.slot_bytes())
        slots = int((self.index_bytes - fixed) // of_all)
        if slots < MIN_SLOTS:
            least = (fixed + MIN_SLOTS * of_all) / (row_bytes(cache) * layers * self.budget)
            raise UserError(
                f"policy {self.name}: an index of {self.index_bytes} bytes holds no {MIN_SLOTS} clusters a KV head; "
                f"give a larger --budget, or index={least:.2g} or more"
            )
        self.clusters = HashClusters(layers, heads, width, axes, slots)
        self.pages = ClusterPages(layers, heads, slots)
        self.row_clusters = RowClusters(layers, heads, self.window_rows)
        middle = self.working_rows // 2 if axes == 1 else self.working_rows // (2 * self.shape.tokens_per_frame)
        self._middle = np.array([self.shape.prefix + middle] + [self.shape.prefix] * (axes - 1), np.float32)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        super().after_append(cache, appended)
        self.forget_lost()
        held = np.sort(cache.seq(0)[0])
        self.row_clusters.keep(held[np.isin(held, self.row_clusters.seq, assume_unique=True)])
        self._join(cache)

    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        if layer == 0:
            self.forget_lost()
        keys, positions, seq = cache.dequantize("key", layer), positions_of(cache, layer), cache.seq(layer)
        if self.working.contiguous:
            for head, goes in enumerate(leaving):
                keys[head, goes] = self._in_the_middle(keys[head, goes], positions[head, goes])
            positions[leaving] = self._middle
        slot = self.row_clusters.of(layer, seq)
        moved, merged = self.clusters.seal(layer, keys, positions, slot, leaving)
        rows = np.nonzero(leaving)[1].reshape(len(leaving), -1)
        home = np.take_along_axis(moved, self.clusters.slots + np.take_along_axis(slot, rows, 1), 1)
        order = np.lexsort((np.take_along_axis(seq, rows, 1), home))
        block = block_of(cache, layer, np.take_along_axis(rows, order, 1))
        self._settle(layer, moved, merged, block, np.take_along_axis(home, order, 1))

    def compacted(self) -> None:
        """Keys have been turned: the window is clustered anew.

        Sealed keys are compared, from the first time on, as if they stood in the middle of the working set's positions.
        """
        first, clusters = not self.working.contiguous, self.clusters
        super().compacted()
        if first:
            sealed = clusters.sealed
            clusters.key[sealed] = self._in_the_middle(clusters.key[sealed], clusters.position[sealed])
            clusters.position[sealed] = self._middle
            clusters.rehash()
        self.row_clusters.keep(self.row_clusters.seq[:0])
        clusters.count[clusters.open] = 0
        self._join(self.cache)

    def _join(self, cache: KVCache) -> None:
        """Rows of the memory that have no cluster join one, or found it, oldest first."""
        newest = self.row_clusters.seq[-1] if len(self.row_clusters.seq) else -1
        slots = []
        for layer in range(cache.layers):
            seq = cache.seq(layer)
            rows = by_seq(cache, layer, (cache.kind(layer) != Kind.PREFIX) & (seq > newest))
            held = cache.dequantize("key", layer), positions_of(cache, layer)
            keys, positions = (np.take_along_axis(of, rows[..., None], 1) for of in held)
            slot, moved, merged, forced = self.clusters.join(layer, keys, positions, self.distance)
            self.merges += forced
            if merged:
                self._settle(layer, moved, merged)
                self.working.forget()
            slots.append(slot)
            came = seq[0, rows[0]]
        self.row_clusters.add(came, np.stack(slots))

    def _in_the_middle(self, keys: Float32, positions: Float32) -> Float32:
        """Keys ``[n, head_dim]`` at ``positions`` ``[n, axes]``, turned to the middle of the working set's positions."""
        return rotate(keys, self._middle - positions, self.cache.inv_freq, self.cache.pair_axis)

    def _settle(self, layer: int, moved: Int32, merged: int, new: Block | None = None, home: Int32 | None = None) -> None:
        """Bring the store to what a call has done to the clusters of a layer.

        new: rows that were sealed, those of one cluster side by side, and where each of them is now, ``[kv_heads, m]``.
        """
        self.merges += merged
        for head, of_old in enumerate(moved[:, : self.clusters.slots]):
            parts: dict[int, Block] = {}
            if new is not None and home is not None:
                starts, of_head = np.flatnonzero(np.diff(home[head], prepend=-1)).tolist(), new.head(head)
                ends = [*starts[1:], len(of_head)]
                parts = {int(home[head, at]): of_head[at:end] for at, end in zip(starts, ends, strict=True)}
            self.pages.update(self.store, layer, head, of_old, parts)
        self._account(layer)

    def forget_lost(self) -> None:
        if numbers := self.store.lost():
            self.pages.mark_lost(numbers)
            for layer in range(self.shape.layers):
                self._account(layer)

    def _account(self, layer: int) -> None:
        """Sealed clusters of a layer count the rows that the store still has of them."""
        held, count, sealed = self.pages.held(layer), self.clusters.count[layer], ~self.clusters.open[layer]
        self.lost += int((count - held)[sealed].sum())
        count[sealed] = held[sealed]
        self.offloaded[layer] = held.sum(1)

    def choose(self, layer: int, query: Float32, phase: Phase) -> Sequence[Sequence[int]]:
        if layer == 0:
            self.forget_lost()
        if not self.offloaded[layer].any():
            return [[]] * self.cache.kv_heads
        blocks, truncated = self.selection(layer, query)
        self.working.truncated += truncated
        return blocks

    def look_ahead(self, layer: int, query: Float32, phase: Phase) -> None:
        if self.offloaded[layer].any():
            self.store.prefetch([number for of_head in self.selection(layer, query)[0] for number in of_head])

    def selection(self, layer: int, query: Float32) -> tuple[list[list[int]], int]:
        """The blocks that rows ``[heads, S, head_dim]`` choose of a layer by WiCSum, best first, for each KV head.

        No more than fit in the working set; with the number of rows that this leaves out.
        """
        best, opened = self.clusters.choose(layer, query, self.threshold), self.clusters.open[layer]
        blocks, truncated = [], 0
        for head, of_head in enumerate(best):
            slots = np.flatnonzero((of_head >= 0) & ~opened[head])
            slots = slots[np.argsort(-of_head[slots], kind="stable")]
            numbers, left = self.pages.blocks_of(layer, head, slots, self.working_rows)
            blocks.append(numbers)
            truncated += left
        return blocks, truncated


def positions_of(cache: KVCache, layer: int) -> Float32:
    """Where rows stand, float32 ``[kv_heads, n, axes]``: on three axes less the patch's own row and column."""
    position = cache.position(layer).astype(np.float32)
    if cache.axes > 1:
        position[..., 1] -= cache.row(layer)
        position[..., 2] -= cache.col(layer)
    return position
