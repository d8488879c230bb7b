"""Mosaic's clusters of keys: their table on the device, their rows in the store, and what a query asks of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native
from edgevlm.runtime.cache import ROW_DTYPES, KVCache
from edgevlm.runtime.kv import codes
from edgevlm.runtime.retrieval.cluster_pages import ClusterPages
from edgevlm.runtime.retrieval.cosine_clusters import (
    NEVER,
    RATE,
    EarlyVariance,
    Float32,
    mean_and_variance,
    nearest_pairs,
    pooled,
    split_in_two,
    units,
)  # fmt: skip
from edgevlm.runtime.retrieval.working_set import dequantize, head_of, rotate, unrotated_keys
from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block, Store, joined

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
At = tuple[int, int, int]  # layer, head, slot

ROW_FIELDS = tuple(name for name in ROW_DTYPES if name != "kind")  # of the newest member, where the representative stands
NONE = -1  # the partition of a free slot, the parent of a cluster that waits for no other
EARLY_ROWS = 64  # rows of a layer whose variance sets its threshold
MERGE_FRACTION = 16  # of so many slots one is freed when all are taken
FULL, OVER = 1, 2  # why the kernel stopped


class MosaicClusters(Stateful):
    """Clusters in ``slots`` slots of each layer and KV head: rows join the nearest, clusters split and merge (Alg. 1).

    key, value: means of the members' keys, un-rotated, and values (eq. 1). variance: eq. 2. size: members, ever. partition: of
    its frames, -1 for a free slot. parent: the slot of the cluster that this one waits to join. seq, frame, row, col,
    position, confirmed: the newest member's, which place the representative. ``changed`` is set when clusters change; the
    policy resets it. ``merged``: clusters that joined another for want of a slot. small, large: multiples of a layer's early
    variance, for the threshold.
    """

    state_fields = ("key", "value", "variance", "size", "partition", "parent", *ROW_FIELDS, "early", "pages")

    def __init__(self, cache: KVCache, store: Store, slots: int, small: float, large: float) -> None:
        shape = (cache.layers, cache.kv_heads, slots)
        self.slots, self._cache, self._store = slots, cache, store
        self.key, self.value = (np.zeros((*shape, cache.head_dim), np.float32) for _ in range(2))
        self.variance = np.zeros(shape)
        self.size, self.seq = (np.zeros(shape, np.int64) for _ in range(2))
        self.frame, self.confirmed = (np.zeros(shape, np.int32) for _ in range(2))
        self.partition, self.parent = (np.full(shape, NONE, np.int32) for _ in range(2))
        self.row, self.col = (np.zeros(shape, np.int16) for _ in range(2))
        self.position = np.zeros((*shape, cache.axes), np.int32)
        self.pages = ClusterPages(*shape)
        self.early = [EarlyVariance(cache.kv_heads, cache.head_dim, EARLY_ROWS) for _ in range(cache.layers)]
        self._times, self.changed, self.merged = (small, large), False, 0

    @staticmethod
    def slot_bytes(cache: KVCache) -> int:
        """Of one slot in one layer and head."""
        return 2 * 4 * cache.head_dim + 3 * 8 + 4 * 4 + 2 * 2 + 4 * cache.axes + ClusterPages.slot_bytes()

    def live(self, layer: int, head: int) -> Int64:
        """Slots that are taken."""
        return np.flatnonzero(self.partition[layer, head] != NONE)

    def _free(self, layer: int, head: int) -> int:
        """The first free slot, or -1."""
        slots = np.flatnonzero(self.partition[layer, head] == NONE)
        return int(slots[0]) if len(slots) else NONE

    # rows come

    def take(self, layer: int, block: Block, partition: Int32) -> None:
        """Add rows of all heads, in the order of the stream; partition: of each, ``[n]``."""
        keys = unrotated_keys(self._cache, layer, block)
        self.early[layer].add(keys)
        for head, key in enumerate(keys):
            of, slots, done = block.head(head), np.zeros(len(block), np.int32), 0
            while done < len(block):
                stopped, event, slot = self._assign(layer, head, key, partition, done, slots)
                self._keep(layer, head, of, slots, done, stopped)
                done = stopped
                if event == FULL:
                    self._merge(layer, head)
                elif event == OVER:
                    self._over((layer, head, slot), of[done : done + 1], key[done : done + 1])
                    done += 1
        self.changed = True

    def _assign(self, layer: int, head: int, key: Float32, partition: Int32, start: int, slots: Int32) -> tuple[int, int, int]:
        """Without a free slot no cluster splits: the nearest takes the newcomer."""
        free = self._free(layer, head) != NONE
        small, large, least = self.early[layer].thresholds(*self._times) if free else NEVER
        at = layer, head
        table = self.key[at], self.variance[at], self.size[at], self.partition[at]
        stopped, event, slot = _native.mosaic_assign(key, partition, start, *table, small, large, RATE, least, slots)
        if event == OVER and self._free(layer, head) == NONE:  # the last one went to another partition on the way
            return self._assign(layer, head, key, partition, stopped, slots)
        return stopped, event, slot

    def _keep(self, layer: int, head: int, block: Block, slots: Int32, start: int, stop: int) -> None:
        """Store rows ``[start, stop)``, each in the block of its cluster."""
        if start == stop:
            return
        order = start + np.argsort(slots[start:stop], kind="stable")
        rows, found = block[order], slots[order]
        firsts = np.flatnonzero(np.diff(found, prepend=NONE))
        ends, of = np.array([*firsts[1:], len(found)]), found[firsts]
        sums = np.add.reduceat(self._values(layer, head, rows).astype(np.float64), firsts)
        mean, size = self.value[layer, head, of], self.size[layer, head, of]
        self.value[layer, head, of] = mean + (sums - (ends - firsts)[:, None] * mean) / size[:, None]
        self._place((layer, head, of), rows, ends - 1)
        parts = zip(of.tolist(), firsts.tolist(), ends.tolist(), strict=True)
        self._update(layer, head, {slot: rows[first:end] for slot, first, end in parts})

    def _over(self, at: At, row: Block, key: Float32) -> None:
        """Split a cluster, or keep the newcomer apart until it is fetched (Alg. 1, lines 3 to 10)."""
        layer, head, slot = at
        blocks = self.pages.block_ids(layer, head, [slot, *self.waiting(*at).tolist()])
        if all(map(self._store.resident, blocks)):
            self.split(*at, row)
        else:
            alone = self._found(layer, head, row, key, int(self.partition[at]))
            self.variance[alone], self.parent[alone] = 0.0, slot

    def _found(self, layer: int, head: int, rows: Block, key: Float32, partition: int) -> At:
        """Make rows a cluster in the first free slot. key: un-rotated."""
        at = (layer, head, self._free(layer, head))
        self.key[at], self.variance[at] = mean_and_variance(key)
        self.value[at] = self._values(layer, head, rows).mean(0)
        self.size[at], self.partition[at] = len(rows), partition
        self._place(at, rows, len(rows) - 1)
        self._update(layer, head, {at[2]: rows})
        return at

    def _place(self, at: tuple[int, int, int | NDArray], block: Block, newest: int | NDArray) -> None:
        """Place the representative at row ``newest`` of a block of one head; several at a time if these are arrays."""
        for name in ROW_FIELDS:
            getattr(self, name)[at] = getattr(block, name)[0, newest]

    def _values(self, layer: int, head: int, block: Block) -> Float32:
        return dequantize(block.value, head_of(self._cache.value_scale(layer), head))[0]

    def _update(self, layer: int, head: int, parts: dict[int, Block], into: int = NONE, gone: int = NONE) -> None:
        """Store rows, by slot, and those of ``gone`` as rows of ``into``."""
        home = np.where(self.pages.rows[layer, head].any(1), np.arange(self.slots), NONE).astype(np.int32)
        if gone != NONE and home[gone] != NONE:
            home[gone] = into
        self.pages.update(self._store, layer, head, home, parts)

    # clusters split, merge and go

    def waiting(self, layer: int, head: int, slot: int) -> Int64:
        """Return the clusters that were kept apart until this one is fetched."""
        return np.flatnonzero(self.parent[layer, head] == slot)

    def split(self, layer: int, head: int, slot: int, newcomer: Block | None = None) -> None:
        """Fetch a cluster, merge those that wait for it and the newcomer, and make two of them (Alg. 1, lines 12 to 17)."""
        family, partition = [slot, *self.waiting(layer, head, slot).tolist()], int(self.partition[layer, head, slot])
        found = self.pages.take_out(self._store, layer, head, family) + ([newcomer] if newcomer else [])
        for gone in family:
            self._clear(layer, head, gone)
        self.changed = True
        if not found:
            return
        block = joined(found)
        block = block[np.argsort(block.seq[0], kind="stable")]
        key = unrotated_keys(self._cache, layer, block, head)[0]
        second = split_in_two(key)
        for half in (~second, second):
            if half.any():
                self._found(layer, head, block[half], key[half], partition)

    def _clear(self, layer: int, head: int, slot: int) -> None:
        """Free a slot. Clusters that waited for it wait no more."""
        at, waiting = (layer, head, slot), self.parent[layer, head]
        self.partition[at] = self.parent[at] = NONE
        self.size[at] = 0
        waiting[waiting == slot] = NONE

    def _merge(self, layer: int, head: int) -> None:
        """Free one slot in MERGE_FRACTION: the nearest clusters of one partition become one, the smaller joins the larger."""
        unit, partition = units(self.key[layer, head]), self.partition[layer, head]
        pairs = nearest_pairs(unit, partition, max(1, self.slots // MERGE_FRACTION))
        size = self.size[layer, head]
        for first, second in pairs or nearest_pairs(unit, np.zeros_like(partition), 1):
            self._join(layer, head, *((first, second) if size[first] >= size[second] else (second, first)))
            self.merged += 1

    def _join(self, layer: int, head: int, into: int, gone: int) -> None:
        """Join two clusters; those that waited for either wait for the result."""
        pair, at = [into, gone], (layer, head, into)
        size, waiting = self.size[layer, head, pair], self.parent[layer, head]
        self.value[at] = size / size.sum() @ self.value[layer, head, pair].astype(np.float64)
        key = self.key[layer, head, pair].astype(np.float64)
        self.key[at], self.variance[at] = pooled(key, self.variance[layer, head, pair], size)
        newer = gone if self.seq[layer, head, gone] > self.seq[at] else into
        for name in ROW_FIELDS:
            getattr(self, name)[at] = getattr(self, name)[layer, head, newer]
        self.size[at] = size.sum()
        waiting[waiting == gone] = into
        if waiting[into] in (into, gone):
            waiting[into] = NONE
        self._clear(layer, head, gone)
        self._update(layer, head, {}, into, gone)

    def relabel(self, into: int, gone: int) -> None:
        """Join two partitions."""
        self.partition[self.partition == gone] = into

    def forget_lost(self) -> None:
        """Remove clusters whose rows are all lost."""
        if not (numbers := self._store.lost()):
            return
        self.pages.mark_lost(numbers)
        for layer in range(self._cache.layers):
            for head, slot in np.argwhere((self.partition[layer] != NONE) & (self.pages.held(layer) == 0)).tolist():
                self._clear(layer, head, slot)
        self.changed = True

    # queries

    def representatives(self, layer: int) -> list[Block]:
        """Return a row for each cluster as the cache stores rows: a block of one for each head."""
        return [self._representatives(layer, head) for head in range(self._cache.kv_heads)]

    def _representatives(self, layer: int, head: int) -> Block:
        cache, live = self._cache, self.live(layer, head)
        key = rotate(self.key[layer, head, live], self.position[layer, head, live], cache.inv_freq, cache.pair_axis)
        return Block(
            self._stored(key, head_of(cache.key_scale(layer), head)),
            self._stored(self.value[layer, head, live], head_of(cache.value_scale(layer), head)),
            *[getattr(self, name)[layer, head, live][None] for name in ROW_FIELDS],
        )

    def _stored(self, rows: Float32, scale: Float32 | None) -> NDArray[np.number]:
        return rows[None].astype(self._cache.dtype) if scale is None else codes(rows[None], scale)

    def choose(self, layer: int, head: int, query: Float32, partitions: int, rows: int) -> Int64:
        """Choose slots, best first, until they hold ``rows`` offloaded rows. query: un-rotated, ``[r, D]``, of a head's group.

        partitions: the most that are searched, by the mean keys of their rows; of equal ones the lower number. Clusters of one
        row are skipped: their representative is that row. Of equal ones the newer is better.
        """
        live = self.live(layer, head)
        if not len(live):
            return live
        key, size, where = (part[layer, head, live] for part in (self.key, self.size, self.partition))
        labels, of = np.unique(where, return_inverse=True)
        if len(labels) > partitions:
            weight = np.where(of[None] == np.arange(len(labels))[:, None], size, 0).astype(np.float32)
            mean = weight / weight.sum(1, keepdims=True) @ key
            labels = labels[np.argsort(-attention_fraction(query, mean), kind="stable")[:partitions]]
        score = np.where(np.isin(where, labels) & (size > 1), attention_fraction(query, key), -1.0)
        order = np.lexsort((-self.seq[layer, head, live], -score))
        order = order[: int((score >= 0).sum())]
        held = self.pages.held(layer)[head, live[order]]
        return live[order[np.cumsum(held) - held < rows]]


def attention_fraction(query: Float32, key: Float32) -> Float32:
    """The mean attention of rows ``query`` ``[r, D]`` to representatives ``key`` ``[k, D]``, among these: float32 ``[k]``."""
    score = query @ key.T / np.float32(np.sqrt(key.shape[1]))
    score = np.exp(score - score.max(1, keepdims=True))
    of_rows: Float32 = (score / score.sum(1, keepdims=True)).mean(0)
    return of_rows
