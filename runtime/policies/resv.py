"""The policy ReSV follows V-Rex: Real-Time Streaming Video LLM Acceleration via Dynamic KV Cache Retrieval, section IV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from edgevlm.runtime import _native
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import Appended, Bool, Float32, setting
from edgevlm.runtime.policies.layer import Layer
from edgevlm.runtime.policies.retrieval import Chosen, Int32, Int64, Retrieval, block_of, by_seq
from edgevlm.runtime.retrieval.cluster_pages import ClusterPages
from edgevlm.runtime.retrieval.working_set import Phase, rotate
from edgevlm.runtime.stateful import State, Stateful
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


BITS = 32  # the number of hyperplanes of each KV head, N_hp
MIN_SLOTS = 4
SEED = 20251212
SPREAD = 32  # standard deviation of the hyperplanes' components, stored as int8 to save memory


class HashClusters(Stateful):
    """A table of up to ``slots`` clusters of keys in each layer and KV head. Between calls, at least one slot is free.

    A cluster is open while tokens may join it, and sealed afterwards. At most half of the slots hold open clusters. ``key``:
    the mean of each cluster's keys, ``[layers, kv_heads, slots, head_dim]``. ``bits``: the mean key's hash, uint32. ``count``:
    each cluster's number of tokens; 0 for a free slot. ``position``: the mean position of each cluster's tokens, ``[...,
    axes]``. ``planes``: the hyperplanes, int8 ``[kv_heads, head_dim, 32]``, rounded normal random numbers.
    """

    state_fields = ("key", "bits", "count", "open", "position", "planes")

    def __init__(self, layers: int, kv_heads: int, head_dim: int, axes: int, slots: int) -> None:
        self.slots = slots
        shape = (layers, kv_heads, slots)
        self.key = np.zeros((*shape, head_dim), np.float32)
        self.bits = np.zeros(shape, np.uint32)
        self.count = np.zeros(shape, np.int32)
        self.open = np.zeros(shape, np.bool_)
        self.position = np.zeros((*shape, axes), np.float32)
        drawn = np.random.default_rng(SEED).standard_normal((kv_heads, head_dim, BITS))
        self.planes = np.clip(np.rint(SPREAD * drawn), -127, 127).astype(np.int8)

    def restore(self, state: State) -> None:
        super().restore(state)
        if (self.count < 0).any() or not (np.isfinite(self.key).all() and np.isfinite(self.position).all()):
            raise ValueError("clusters with a negative token count, or with a key or position that is not finite")

    @staticmethod
    def slot_bytes(head_dim: int, axes: int) -> int:
        return 4 * head_dim + 4 + 4 + 1 + 4 * axes

    def join(self, layer: int, keys: Float32, positions: Float32, distance: int) -> tuple[Int32, Int32, int, int]:
        """Add tokens one by one, each to the nearest open cluster within ``distance`` bits or to a new cluster.

        ``keys``: rotated, ``[kv_heads, n, head_dim]``. ``positions``: ``[kv_heads, n, axes]``. The lowest slot wins ties, and a
        new cluster takes the lowest free slot. Once half of the slots hold open clusters, each token joins the nearest open
        cluster, however far it is. Returns each token's slot ``[kv_heads, n]``, the two results of :meth:`seal`, and the number
        of tokens that joined a cluster farther away than ``distance`` bits.
        """
        return _native.hash_join(keys, positions, distance, *self._of(layer))

    def seal(self, layer: int, keys: Float32, positions: Float32, slot: Int32, leaving: Bool) -> tuple[Int32, int]:
        """Move each open cluster's leaving rows to a new, sealed cluster, and update the open cluster's mean.

        All arrays are ``[kv_heads, n, ...]``. ``slot``: the slot of each row's cluster, or -1 for a row in no cluster. Returns
        ``home`` ``[kv_heads, 2 * slots]``, and the number of clusters that were merged because no slot was free. ``home[h, s]``
        is the new slot of the sealed cluster that was in slot s. ``home[h, slots + s]`` is the slot of the new cluster made
        from open cluster s. A slot of -1 means no cluster.
        """
        return _native.hash_seal(keys, positions, slot, leaving, *self._of(layer))

    def choose(self, layer: int, query: Float32, fraction: float) -> Float32:
        """Let each row of a query choose clusters by WiCSum (eqs. 1 to 3).

        ``query``: rotated, ``[heads, S, head_dim]``. Returns float32 ``[kv_heads, slots]``: a cluster's highest score among the
        rows that choose it, or -1 if no row does. ``fraction``: the fraction of a row's total score that the chosen clusters
        must exceed.
        """
        return _native.wicsum(query, self.key[layer], self.count[layer], fraction)

    @property
    def sealed(self) -> Bool:
        """A mask of the slots with sealed clusters, ``[layers, kv_heads, slots]``."""
        return (self.count > 0) & ~self.open

    def rehash(self) -> None:
        """Recompute the mean keys' hashes after the keys were rotated."""
        for layer, keys in enumerate(self.key):
            self.bits[layer] = _native.hash_bits(keys, self.planes.astype(np.float32))

    def _of(self, layer: int) -> tuple[Any, ...]:
        parts = (self.key, self.bits, self.count, self.open, self.position)
        return (*(part[layer] for part in parts), self.planes.astype(np.float32))


class RowClusters(Stateful):
    """A table of the window's rows, at most ``rows``: it gives each row's cluster in every layer and KV head. A row is
    looked up by its ``seq``.
    """

    state_fields = ("_seq", "_slot", "_held")

    def __init__(self, layers: int, kv_heads: int, rows: int) -> None:
        self._seq = np.zeros(rows, np.int64)  # ascending
        self._slot = np.zeros((layers, kv_heads, rows), np.int32)
        self._held = 0

    @staticmethod
    def row_bytes(layers: int, kv_heads: int) -> int:
        return 8 + 4 * layers * kv_heads

    @property
    def seq(self) -> Int64:
        return self._seq[: self._held]

    def keep(self, seq: Int64) -> None:
        """Keep only the rows with these ``seq``. ``seq``: ascending, ``[n]``; all must be in the table."""
        at = np.searchsorted(self.seq, seq)
        self._held = len(at)
        self._seq[: self._held], self._slot[..., : self._held] = self._seq[at], self._slot[..., at]

    def add(self, seq: Int64, slot: Int32) -> None:
        """Add rows that are newer than all others. ``seq``: ascending, ``[n]``. ``slot``: ``[layers, kv_heads, n]``."""
        new = slice(self._held, self._held + len(seq))
        self._seq[new], self._slot[..., new], self._held = seq, slot, new.stop

    def of(self, layer: int, seq: Int64) -> Int32:
        """Return each row's cluster slot, or -1 for an unknown row. ``seq``: in any order, ``[kv_heads, n]``."""
        if not self._held:
            return np.full(seq.shape, -1, np.int32)
        at = np.minimum(np.searchsorted(self.seq, seq), self._held - 1)
        slot = np.take_along_axis(self._slot[layer], at, 1)
        return np.where(self._seq[at] == seq, slot, np.int32(-1))


@dataclass
class ReSV(Retrieval):
    """Cluster keys by hash bits, and fetch the fewest clusters that hold a given fraction of each query row's attention.

    Bit p of a key's hash is 1 if the key's dot product with hyperplane p is positive. A token joins the nearest open cluster
    within a Hamming distance, or starts a new cluster. By WiCSum, each query row takes clusters in descending order of the
    score softmax(q K_cluster^T / sqrt D), until the sum of score times token count exceeds a fraction of the row's total.

    Ours: each layer chooses its clusters with its own query. A score is a softmax, because raw dot products may be negative.
    Clusters in the window count towards a row's total but are not fetched, because every call attends to the window. A KV head
    fetches all clusters that the rows of its query heads choose. When rows of a cluster leave the window, they form a separate
    cluster.
    """

    distance: int = setting(7, "maximum Hamming distance from a token to its cluster, in bits; Th_hp - 1", at_least=0)
    threshold: float = setting(
        0.3, "fraction of a row's attention that its clusters must exceed (Th_r-wics)", at_least=0, below=1
    )

    name: ClassVar[str] = "resv"
    paper: ClassVar[str] = "V-Rex, sec. IV"
    state_fields = (*Retrieval.state_fields, "clusters", "pages", "row_clusters")
    _scratch_fields = (*Retrieval._scratch_fields, "_middle")

    def open(self, cache: KVCache, store: Store) -> None:
        """Create the index. Raises UserError if the index has no room for MIN_SLOTS clusters."""
        super().open(cache, store)
        layers, heads, width, axes = cache.layers, cache.kv_heads, cache.head_dim, cache.axes
        fixed = heads * width * BITS + self.window_rows * RowClusters.row_bytes(layers, heads)
        of_all = layers * heads * (HashClusters.slot_bytes(width, axes) + ClusterPages.slot_bytes())
        slots = int((self.index_bytes - fixed) // of_all)
        if slots < MIN_SLOTS:
            raise self.no_room(f"{MIN_SLOTS} clusters")
        self.clusters = HashClusters(layers, heads, width, axes, slots)
        self.pages = ClusterPages(layers, heads, slots)
        self.row_clusters = RowClusters(layers, heads, self.window_rows)
        middle = self.working_rows // 2 if axes == 1 else self.working_rows // (2 * self.shape.tokens_per_frame)
        self._middle = np.array([self.shape.prefix + middle] + [self.shape.prefix] * (axes - 1), np.float32)

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        super().after_append(layers, appended)
        self.forget_lost()
        held = np.sort(layers[0].seq[0])
        self.row_clusters.keep(held[np.isin(held, self.row_clusters.seq, assume_unique=True)])
        self._join(self.cache)

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
        """Cluster the window again after its keys were rotated.

        The first re-indexing also rotates the mean keys of sealed clusters to the middle of the working set's positions.
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
        return rotate(keys, self._middle - positions, self.cache.inv_freq, self.cache.pair_axis)

    def _settle(self, layer: int, moved: Int32, merged: int, new: Block | None = None, home: Int32 | None = None) -> None:
        """Apply a layer's cluster changes to the store.

        ``new``: the rows just sealed, grouped by cluster. ``home``: the cluster slot of each row of ``new``, ``[kv_heads, m]``.
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
        held, count, sealed = self.pages.held(layer), self.clusters.count[layer], ~self.clusters.open[layer]
        self.lost += int((count - held)[sealed].sum())
        count[sealed] = held[sealed]
        self.offloaded[layer] = held.sum(1)

    def choose(self, layer: int, query: Float32, phase: Phase) -> Chosen:
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
        """Return the blocks that each KV head chooses, best first, and how many rows do not fit in the working set."""
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
    """Return the rows' positions. If there are three axes, subtract the patch's row and column.

    Returns float32 ``[kv_heads, n, axes]``.
    """
    position = cache.position(layer).astype(np.float32)
    if cache.axes > 1:
        position[..., 1] -= cache.row(layer)
        position[..., 2] -= cache.col(layer)
    return position
