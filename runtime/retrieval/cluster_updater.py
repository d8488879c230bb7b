"""Changes of Mosaic's clusters: rows join the nearest, clusters split at once or when next fetched, and merge (Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgevlm.runtime import _native
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.retrieval.cluster_pages import ClusterPages
from edgevlm.runtime.retrieval.cluster_table import NONE, ClusterTable, Int32, Int64
from edgevlm.runtime.retrieval.partitions import (
    MIN_SIZE,
    NEVER,
    RATE,
    EarlyVariance,
    Float32,
    Threshold,
    mean_and_variance,
    nearest_pairs,
    split_in_two,
    units,
)  # fmt: skip
from edgevlm.runtime.retrieval.working_set import dequantize, head_of, unrotated_keys
from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block, Store, joined

At = tuple[int, int, int]  # layer, head, slot

EARLY_ROWS = 64  # rows of a layer whose variance sets its threshold
MERGE_FRACTION = 16  # of so many slots one is freed when all are taken
FULL, OVER = 1, 2  # why the kernel stopped


@dataclass(slots=True)
class UpdateCounts:
    """Counted since the session opened. deferred: rows that waited for a split. splits: deferred ones included.

    merges: of two clusters, for want of a slot. lost: rows that the store has lost.
    """

    splits: int = 0
    deferred: int = 0
    merges: int = 0
    lost: int = 0


class ClusterUpdater(Stateful):
    """Keeps table, ``pages`` and store in step. ``changed`` is set when clusters change; the policy resets it.

    small, large: multiples of a layer's early variance, for the threshold.
    """

    state_fields = ("early", "pages")

    def __init__(
        self,
        cache: KVCache,
        store: Store,
        table: ClusterTable,
        *,
        small: float = 0.5,
        large: float = 1.0,
    ) -> None:
        self.cache, self.store, self.table = cache, store, table
        self.pages = ClusterPages(cache.layers, cache.kv_heads, table.slots)
        self.counts, self.changed = UpdateCounts(), False
        self._times = small, large
        self.early = [EarlyVariance(cache.kv_heads, cache.head_dim, EARLY_ROWS) for _ in range(cache.layers)]

    def threshold(self, layer: int) -> Threshold | None:
        """The threshold of a layer; None until its early variance is known."""
        return self.early[layer].threshold(*self._times)

    def take(self, layer: int, block: Block, partition: Int32) -> None:
        """Add rows of all heads, in the order of the stream; partition: of each, ``[n]``."""
        heads = [block.head(head) for head in range(self.cache.kv_heads)]
        keys = unrotated_keys(self.cache, layer, block)
        self.early[layer].add(keys)
        for head, of in enumerate(heads):
            self._take(layer, head, of, keys[head], partition)
        self.changed = True

    def _take(self, layer: int, head: int, block: Block, key: Float32, partition: Int32) -> None:
        slots, done = np.zeros(len(block), np.int32), 0
        while done < len(block):
            stopped, event, slot = self._assign(layer, head, key, partition, done, slots)
            self._keep(layer, head, block, slots, done, stopped)
            done = stopped
            if event == FULL:
                self._merge(layer, head)
            elif event == OVER:
                self._over((layer, head, slot), block[done : done + 1], key[done])
                done += 1

    def _assign(self, layer: int, head: int, key: Float32, partition: Int32, start: int, slots: Int32) -> tuple[int, int, int]:
        """Without a free slot no cluster splits: the nearest takes the newcomer."""
        table, limit = self.table, self.threshold(layer)
        may = limit is not None and table.free(layer, head) != NONE
        small, large, least = (limit.small, limit.large, MIN_SIZE) if limit and may else (0.0, 0.0, NEVER)
        own, variance = table.key[layer, head], table.variance[layer, head]
        size, of = table.size[layer, head], table.partition[layer, head]
        stopped, event, slot = _native.mosaic_assign(
            key, partition, start, own, variance, size, of, small, large, RATE, least, slots
        )
        if event == OVER and table.free(layer, head) == NONE:  # the last one went to another partition on the way
            return self._assign(layer, head, key, partition, stopped, slots)
        return stopped, event, slot

    def _keep(self, layer: int, head: int, block: Block, slots: Int32, start: int, stop: int) -> None:
        """Store rows ``[start, stop)``, each in the block of its cluster."""
        if start == stop:
            return
        table, order = self.table, start + np.argsort(slots[start:stop], kind="stable")
        rows, found = block[order], slots[order]
        firsts = np.flatnonzero(np.diff(found, prepend=NONE))
        ends, of = [*firsts[1:].tolist(), len(found)], found[firsts]
        count, last = np.diff([*firsts, len(found)]), np.array(ends) - 1
        sums = np.add.reduceat(self._values(layer, head, rows).astype(np.float64), firsts)
        mean = table.value[layer, head, of]
        table.value[layer, head, of] = mean + (sums - count[:, None] * mean) / table.size[layer, head, of][:, None]
        table.place((layer, head, of), rows, last)
        parts = zip(of.tolist(), firsts.tolist(), ends, strict=True)
        self._update(layer, head, {slot: rows[first:end] for slot, first, end in parts})

    def _values(self, layer: int, head: int, block: Block) -> Float32:
        return dequantize(block.value, head_of(self.cache.value_scale(layer), head))[0]

    def _update(self, layer: int, head: int, parts: dict[int, Block], into: int = NONE, gone: int = NONE) -> None:
        """Store rows, by slot, and those of ``gone`` as rows of ``into``."""
        home = np.where(self.pages.rows[layer, head].any(1), np.arange(self.table.slots), NONE).astype(np.int32)
        if gone != NONE and home[gone] != NONE:
            home[gone] = into
        self.counts.lost += sum(self.pages.update(self.store, layer, head, home, parts).values())

    def _over(self, at: At, row: Block, key: Float32) -> None:
        """Split a cluster, or keep the newcomer apart until it is fetched (Alg. 1, lines 3 to 10)."""
        table, (layer, head, slot) = self.table, at
        if all(map(self.store.resident, self.pages.block_ids(layer, head, self._family(layer, head, slot)))):
            self.split(layer, head, slot, row)
            return
        alone = (layer, head, table.free(layer, head))
        table.set(alone, key.astype(np.float64), 0.0, 1, int(table.partition[at]))
        table.value[alone] = self._values(layer, head, row)[0]
        table.place(alone, row, 0)
        self._update(layer, head, {alone[2]: row})
        table.parent[alone] = slot
        self.counts.deferred += 1

    def waiting(self, layer: int, head: int, slot: int) -> Int64:
        """Return the clusters that were kept apart until this one is fetched."""
        return np.flatnonzero(self.table.parent[layer, head] == slot)

    def _family(self, layer: int, head: int, slot: int) -> list[int]:
        return [slot, *self.waiting(layer, head, slot).tolist()]

    def split(self, layer: int, head: int, slot: int, newcomer: Block | None = None) -> None:
        """Fetch a cluster, merge those that wait for it and the newcomer, and make two of them (Alg. 1, lines 12 to 17)."""
        table, family = self.table, self._family(layer, head, slot)
        found = self.pages.take_out(self.store, layer, head, family) + ([newcomer] if newcomer else [])
        partition = int(table.partition[layer, head, slot])
        for gone in reversed(family):
            table.clear(layer, head, gone)
        self.changed = True
        if not found:
            return
        block = in_order(joined(found))
        key = unrotated_keys(self.cache, layer, block, head)[0]
        second = split_in_two(key)
        self.counts.splits += bool(second.any())
        for half in (~second, second):
            if half.any():
                at = (layer, head, table.free(layer, head))
                mean, variance = mean_and_variance(key[half])
                of = block[half]
                table.set(at, mean, variance, len(of), partition)
                table.value[at] = self._values(layer, head, of).mean(0)
                table.place(at, of, len(of) - 1)
                self._update(layer, head, {at[2]: of})

    def _merge(self, layer: int, head: int) -> None:
        """Free one slot in MERGE_FRACTION: the nearest clusters of one partition become one."""
        table, count = self.table, max(1, self.table.slots // MERGE_FRACTION)
        unit, partition = units(table.key[layer, head]), table.partition[layer, head]
        pairs = nearest_pairs(unit, partition, count) or nearest_pairs(unit, np.zeros_like(partition), 1)
        for pair in pairs:
            self._join(layer, head, *pair)
            self.counts.merges += 1

    def _join(self, layer: int, head: int, first: int, second: int) -> None:
        """Add the rows of the smaller to the larger."""
        size = self.table.size[layer, head]
        into, gone = (first, second) if size[first] >= size[second] else (second, first)
        self.table.join(layer, head, into, gone)
        self._update(layer, head, {}, into, gone)

    def relabel(self, into: int, gone: int) -> None:
        """Join two partitions."""
        partition = self.table.partition
        partition[partition == gone] = into

    def forget_lost(self) -> None:
        """Remove clusters whose rows are all lost."""
        if numbers := self.store.lost():
            self._lost(self.pages.mark_lost(numbers))

    def compact(self) -> None:
        """Renumber runs of pages that have lost many."""
        self._lost(self.pages.compact(self.store))

    def _lost(self, rows: Int32) -> None:
        self.counts.lost += int(rows.sum())
        gone = (rows > 0) & (self.pages.held == 0)
        for layer, head, slot in np.argwhere(gone).tolist():
            self.table.clear(layer, head, slot)
        self.changed = self.changed or bool(rows.any())


def in_order(block: Block) -> Block:
    """Sort the rows of a block of one head by their place in the stream."""
    return block[np.argsort(block.seq[0], kind="stable")]
