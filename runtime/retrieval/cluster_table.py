"""Mosaic's index: what is known on the device of the offloaded clusters, and which of them a query asks for (sec. V-C)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cache import ROW_DTYPES, KVCache
from edgevlm.runtime.kv import codes
from edgevlm.runtime.retrieval.partitions import Float32, Float64, pooled
from edgevlm.runtime.retrieval.working_set import head_of, rotate
from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
ROW_FIELDS = tuple(name for name in ROW_DTYPES if name != "kind")  # of the newest member, where the representative stands
NONE = -1  # the partition of a free slot, the parent of a cluster that waits for no other


class ClusterTable(Stateful):
    """Slots for clusters, K of each layer and KV head; ``partition`` is -1 for free ones.

    key, value: means of the members' keys, un-rotated, and values (eq. 1). variance: eq. 2. size: members, ever. parent: the
    slot of the cluster that this one waits to join. seq, frame, row, col, position, confirmed: the newest member's, which place
    the representative.
    """

    state_fields = ("key", "value", "variance", "size", "partition", "parent", *ROW_FIELDS)

    def __init__(self, cache: KVCache, slots: int) -> None:
        shape = (cache.layers, cache.kv_heads, slots)
        self.slots, self._cache = slots, cache
        self.key, self.value = (np.zeros((*shape, cache.head_dim), np.float32) for _ in range(2))
        self.variance = np.zeros(shape)
        self.size, self.seq = (np.zeros(shape, np.int64) for _ in range(2))
        self.frame, self.confirmed = (np.zeros(shape, np.int32) for _ in range(2))
        self.partition, self.parent = (np.full(shape, NONE, np.int32) for _ in range(2))
        self.row, self.col = (np.zeros(shape, np.int16) for _ in range(2))
        self.position = np.zeros((*shape, cache.axes), np.int32)

    @staticmethod
    def slot_bytes(cache: KVCache) -> int:
        """Of one slot in one layer and head."""
        return 2 * 4 * cache.head_dim + 3 * 8 + 4 * 4 + 2 * 2 + 4 * cache.axes

    def live(self, layer: int, head: int) -> Int64:
        """Slots that are taken."""
        return np.flatnonzero(self.partition[layer, head] != NONE)

    def free(self, layer: int, head: int) -> int:
        """The first free slot, or -1."""
        slots = np.flatnonzero(self.partition[layer, head] == NONE)
        return int(slots[0]) if len(slots) else -1

    def clear(self, layer: int, head: int, slot: int) -> None:
        """Free a slot. Clusters that waited for it wait no more."""
        at = layer, head, slot
        self.partition[at] = self.parent[at] = NONE
        self.size[at] = 0
        waiting = self.parent[layer, head]
        waiting[waiting == slot] = NONE

    def set(self, at: tuple[int, int, int], key: Float64, variance: float, size: int, partition: int) -> None:
        """Take a slot, or give its cluster other members."""
        self.key[at], self.variance[at], self.size[at], self.partition[at] = key, variance, size, partition

    def place(self, at: tuple[int, int, int | NDArray], block: Block, newest: int | NDArray) -> None:
        """Place the representative at row ``newest`` of a block of one head; several at a time if these are arrays."""
        for name in ROW_FIELDS:
            getattr(self, name)[at] = getattr(block, name)[0, newest]

    def join(self, layer: int, head: int, into: int, gone: int) -> None:
        """Join two clusters in the index, not in the store; clusters that waited for either wait for the result."""
        pair = [into, gone]
        size, at = self.size[layer, head, pair], (layer, head, into)
        key, variance = pooled(self.key[layer, head, pair].astype(np.float64), self.variance[layer, head, pair], size)
        value = size / size.sum() @ self.value[layer, head, pair].astype(np.float64)
        newer = gone if self.seq[layer, head, gone] > self.seq[at] else into
        for name in ROW_FIELDS:
            getattr(self, name)[at] = getattr(self, name)[layer, head, newer]
        self.set(at, key, variance, int(size.sum()), int(self.partition[at]))
        self.value[at] = value
        waiting = self.parent[layer, head]
        waiting[waiting == gone] = into
        if waiting[into] in (into, gone):
            waiting[into] = NONE
        self.clear(layer, head, gone)

    def representatives(self, layer: int) -> list[Block]:
        """Return a row for each cluster as the cache stores rows: a block of one for each head."""
        return [self._representatives(layer, head) for head in range(self._cache.kv_heads)]

    def _representatives(self, layer: int, head: int) -> Block:
        cache, live = self._cache, self.live(layer, head)
        position = self.position[layer, head, live]
        key = rotate(self.key[layer, head, live], position, cache.inv_freq, cache.pair_axis)
        return Block(
            self._stored(key, head_of(cache.key_scale(layer), head)),
            self._stored(self.value[layer, head, live], head_of(cache.value_scale(layer), head)),
            *[getattr(self, name)[layer, head, live][None] for name in ROW_FIELDS],
        )

    def _stored(self, rows: Float32, scale: Float32 | None) -> NDArray[np.number]:
        return rows[None].astype(self._cache.dtype) if scale is None else codes(rows[None], scale)


def attention_fraction(query: Float32, key: Float32) -> Float32:
    """The mean attention of rows ``query`` ``[r, D]`` to representatives ``key`` ``[k, D]``, among these: float32 ``[k]``."""
    score = query @ key.T / np.float32(np.sqrt(key.shape[1]))
    score = np.exp(score - score.max(1, keepdims=True))
    of_rows: Float32 = (score / score.sum(1, keepdims=True)).mean(0)
    return of_rows


def choose_clusters(
    table: ClusterTable, layer: int, head: int, query: Float32, partitions: int, held: Int32, rows: int
) -> Int64:
    """Choose slots, best first, until they hold ``rows`` offloaded rows. query: un-rotated, ``[r, D]``, of a KV head's group.

    held: offloaded rows of each slot. partitions: the most that are searched, by the mean keys of their rows. Clusters of one
    row are skipped: their representative is that row. Of equal ones the newer is better.
    """
    where = table.partition[layer, head]
    live = np.flatnonzero(where != NONE)
    if not len(live):
        return live
    key = table.key[layer, head, live]
    inside = np.isin(where[live], _partitions(table, layer, head, live, query, partitions))
    score = np.where(inside & (table.size[layer, head, live] > 1), attention_fraction(query, key), -1.0)
    order = np.lexsort((-table.seq[layer, head, live], -score))
    order = order[: int((score >= 0).sum())]
    before = np.cumsum(held[live[order]]) - held[live[order]]
    return live[order[before < rows]]


def _partitions(table: ClusterTable, layer: int, head: int, live: Int64, query: Float32, count: int) -> Int64:
    """The ``count`` partitions whose mean key gets the most attention; of equal ones the lower number."""
    labels, of = np.unique(table.partition[layer, head, live], return_inverse=True)
    if len(labels) <= count:
        return labels
    weight = np.where(of[None] == np.arange(len(labels))[:, None], table.size[layer, head, live], 0).astype(np.float32)
    mean = weight / weight.sum(1, keepdims=True) @ table.key[layer, head, live]
    return labels[np.argsort(-attention_fraction(query, mean), kind="stable")[:count]]
