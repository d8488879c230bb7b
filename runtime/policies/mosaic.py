"""The policy Mosaic clusters frames, and keys within each cluster of frames (sections V to VII and Alg. 1 of its paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native
from edgevlm.runtime.cache import ROW_DTYPES
from edgevlm.runtime.kv import codes
from edgevlm.runtime.policies.attention import Float64
from edgevlm.runtime.policies.base import Appended, Bool, Float32, Needs, setting
from edgevlm.runtime.policies.layer import Layer
from edgevlm.runtime.policies.retrieval import Chosen, Int32, Int64, Retrieval, block_of, by_seq
from edgevlm.runtime.retrieval.cluster_pages import ClusterPages
from edgevlm.runtime.retrieval.working_set import Phase, dequantize, head_of, rotate, unrotated_keys
from edgevlm.runtime.stateful import State, Stateful
from edgevlm.runtime.store import Block, Store, joined

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Thresholds = tuple[float, float, int]

RATE = 32.0  # beta of eq. 5
MIN_SIZE = 8
MIN_VARIANCE = 1e-3  # a lower limit for thresholds, so that rounding does not split a cluster of equal members
KMEANS_ROUNDS = 8
EARLY_FRAMES = 16
NEVER = 0.0, 0.0, 2**62
"""Thresholds that no cluster exceeds."""
At = tuple[int, int, int]  # layer, head, slot

ROW_FIELDS = tuple(name for name in ROW_DTYPES if name != "kind")
NONE = -1  # the partition of a free slot, and the parent of a cluster that is not waiting to join another cluster
EARLY_ROWS = 64
MERGE_FRACTION = 16  # frees 1 / MERGE_FRACTION of the slots when no slot is free
FULL, OVER = 1, 2
VISUAL = 8
SCENE = 2.0  # widens the frames' thresholds, which come from the first frames and so from a single scene


class EarlyVariance(Stateful):
    """The variance of the first ``rows`` rows of each stream, as if the rows were one cluster (eqs. 3 and 4).

    ``mean``: float64 ``[streams, width]``. ``variance``: ``[streams]``. ``seen``: the number of rows added to each stream.
    """

    state_fields = ("seen", "mean", "variance")

    def __init__(self, streams: int, width: int, rows: int) -> None:
        self.rows, self.seen = rows, np.zeros(1, np.int64)
        self.mean, self.variance = np.zeros((streams, width)), np.zeros(streams)

    def add(self, rows: Float32) -> None:
        """Add n rows to each stream, ``[streams, n, width]``. All but the first ``rows`` rows of a stream are ignored."""
        for row in rows.transpose(1, 0, 2)[: max(0, self.rows - int(self.seen[0]))].astype(np.float64):
            self.seen += 1
            self.mean += (row - self.mean) / self.seen
            self.variance += (1 - cosine(row, self.mean) - self.variance) / self.seen

    def thresholds(self, small: float, large: float) -> Thresholds:
        """Return the maximum variance of small and of large clusters (eq. 5), and the minimum size of a cluster that may split.

        The maximum variances are the early variance times ``small`` and times ``large``. Returns NEVER until ``rows`` rows have
        been added.
        """
        if self.seen < self.rows:
            return NEVER
        variance = float(self.variance.mean())
        return max(MIN_VARIANCE, small * variance), max(MIN_VARIANCE, large * variance), MIN_SIZE


def cosine(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the cosine similarity of vectors ``[..., width]``, or 0 if either vector is zero."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    dots = (a * b).sum(-1)
    return np.asarray(np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0))


def units(rows: NDArray[np.floating]) -> Float64:
    """Scale each row to length 1, in float64. Rows of zeros stay zero. ``rows``: ``[n, width]``."""
    wide = rows.astype(np.float64)
    length = np.linalg.norm(wide, axis=-1, keepdims=True)
    return np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)


def mean_and_variance(rows: NDArray[np.floating]) -> tuple[Float64, float]:
    """Return the mean of the rows, and their mean distance 1 - cos from this mean (eqs. 1 and 2). ``rows``: ``[n, width]``."""
    mean = rows.astype(np.float64).mean(0)
    return mean, float(np.mean(1 - units(rows) @ units(mean[None])[0]))


def pooled(mean: Float64, variance: Float64, size: NDArray[np.integer]) -> tuple[Float64, float]:
    """Return the mean and variance of m clusters joined into one.

    ``mean``: ``[m, width]``. ``variance``, ``size``: ``[m]``. The new mean is exact. The new variance is approximate: each
    cluster's distance from the new mean is added to its variance.
    """
    weight = size / size.sum()
    joint = weight @ mean
    return joint, float(weight @ (variance + 1 - cosine(mean, joint)))


def split_in_two(rows: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Split rows into two clusters by k-means with cosines. Return a mask of the rows in the second cluster, bool ``[n]``.

    ``rows``: ``[n, width]``. The first centre is the row least similar to the mean. The second centre is the row least similar
    to the first. If all rows are parallel, the second cluster is empty.
    """
    unit = units(rows)
    first = unit[np.argmin(unit @ units(unit.mean(0)[None])[0])]
    centre = np.stack([first, unit[np.argmin(unit @ first)]])
    second = np.zeros(len(rows), np.bool_)
    for _ in range(KMEANS_ROUNDS):
        similar = unit @ centre.T
        now = similar[:, 1] > similar[:, 0]
        if now.all() or not now.any() or np.array_equal(now, second):
            break
        second = now
        centre = units(np.stack([rows[~now].astype(np.float64).mean(0), rows[now].astype(np.float64).mean(0)]))
    return second


def nearest_pairs(unit: NDArray[np.float64], label: NDArray[np.integer], count: int) -> list[tuple[int, int]]:
    """Return up to ``count`` pairs (lower, higher) of rows with the same label, most similar first. No row is in two pairs."""
    similar = np.where(np.triu(label[:, None] == label, 1), unit @ unit.T, -np.inf)
    pairs: list[tuple[int, int]] = []
    used = np.zeros(len(unit), np.bool_)
    for flat in np.argsort(-similar, axis=None, kind="stable"):
        first, second = divmod(int(flat), len(unit))
        if len(pairs) == count or similar[first, second] == -np.inf:
            break
        if not used[first] and not used[second]:
            pairs.append((first, second))
            used[[first, second]] = True
    return pairs


class Partitions(Stateful):
    """A table of up to ``slots`` partitions. A partition is a cluster of frames with similar features.

    Partitions are never split: a split would have to fetch all rows of the frames. If no slot is free, the two most similar
    partitions merge. ``small``, ``large``: the maximum variances of small and large clusters, divided by the early variance.
    """

    state_fields = ("mean", "variance", "size", "taken", "_of", "_early")

    def __init__(self, slots: int, width: int, frames: int, small: float, large: float) -> None:
        self.slots, self._times = slots, (small, large)
        self.mean, self.variance = np.zeros((slots, width), np.float32), np.zeros(slots)
        self.size, self.taken = np.zeros(slots, np.int64), np.full(slots, -1, np.int32)  # -1 for a free slot, 0 for a used one
        self._of = np.zeros(frames, np.int32)
        self._early = EarlyVariance(1, width, EARLY_FRAMES)
        self.merged = 0

    @staticmethod
    def slot_bytes(width: int) -> int:
        return 4 * width + 8 + 8 + 4

    def of(self, frames: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return each frame's partition. ``frames``: the numbers of recent frames."""
        return self._of[frames % len(self._of)]

    def take(self, frames: NDArray[np.integer], features: Float32) -> list[tuple[int, int]]:
        """Add frames to partitions. Return the partitions that were merged, as (kept, gone) pairs.

        ``frames``: frame numbers, ``[n]``. ``features``: each frame's features, ``[n, width]``.
        """
        joined: list[tuple[int, int]] = []
        rows = np.ascontiguousarray(features, np.float32)
        for at, frame in enumerate(frames.tolist()):
            self._early.add(rows[None, at : at + 1])
            self._of[frame % len(self._of)] = self._assign(rows[at : at + 1], joined)
        return joined

    def _assign(self, row: Float32, joined: list[tuple[int, int]]) -> int:
        slot, where = np.zeros(1, np.int32), np.zeros(1, np.int32)
        small, large, least = self._early.thresholds(*self._times) if self.slots > 1 else NEVER
        table = (self.mean, self.variance, self.size, self.taken)
        if _native.mosaic_assign(row, where, 0, *table, small, large, RATE, least, slot)[0]:
            return int(slot[0])
        free = np.flatnonzero(self.taken < 0)
        at = int(free[0]) if len(free) else self._merge(joined)
        self.mean[at], self.variance[at], self.size[at], self.taken[at] = row[0], 0, 1, 0
        return at

    def _merge(self, joined: list[tuple[int, int]]) -> int:
        into, gone = nearest_pairs(units(self.mean), np.zeros(self.slots, np.int32), 1)[0]
        pair = [into, gone]
        self.mean[into], self.variance[into] = pooled(self.mean[pair].astype(np.float64), self.variance[pair], self.size[pair])
        self.size[into] += self.size[gone]
        self._of[self._of == gone] = into
        joined.append((into, gone))
        self.merged += 1
        return gone


class MosaicClusters(Stateful):
    """A table of up to ``slots`` clusters in each layer and KV head. Rows join clusters, and clusters split and merge (Alg. 1).

    ``key``, ``value``: the means of the members' un-rotated keys and of their values (eq. 1). ``variance``: the members'
    variance (eq. 2). ``size``: the number of members ever added. ``partition``: the partition of the members' frames, -1 for a
    free slot. ``parent``: the slot of the cluster that this cluster waits to join. ``seq``, ``frame``, ``row``, ``col``,
    ``position``, ``confirmed``: the newest member's metadata, also used for the representative. ``changed``: whether clusters
    have changed since the policy reset this flag. ``small``, ``large``: as in :class:`Partitions`, for each layer.
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
        return 2 * 4 * cache.head_dim + 3 * 8 + 4 * 4 + 2 * 2 + 4 * cache.axes + ClusterPages.slot_bytes()

    def live(self, layer: int, head: int) -> Int64:
        return np.flatnonzero(self.partition[layer, head] != NONE)

    def _free(self, layer: int, head: int) -> int:
        slots = np.flatnonzero(self.partition[layer, head] == NONE)
        return int(slots[0]) if len(slots) else NONE

    # adding rows

    def take(self, layer: int, block: Block, partition: Int32) -> None:
        """Add a block's rows in the order of the stream, for all heads. ``partition``: each row's partition, ``[n]``."""
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
        """Assign rows to clusters. If no slot is free, no cluster is split, and rows join the nearest cluster."""
        free = self._free(layer, head) != NONE
        small, large, least = self.early[layer].thresholds(*self._times) if free else NEVER
        at = layer, head
        table = self.key[at], self.variance[at], self.size[at], self.partition[at]
        stopped, event, slot = _native.mosaic_assign(key, partition, start, *table, small, large, RATE, least, slots)
        if event == OVER and self._free(layer, head) == NONE:  # a row of a new partition has taken the last free slot
            return self._assign(layer, head, key, partition, stopped, slots)
        return stopped, event, slot

    def _keep(self, layer: int, head: int, block: Block, slots: Int32, start: int, stop: int) -> None:
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
        """Split a cluster above its threshold (Alg. 1, lines 3 to 10).

        If part of the cluster is not in host memory, the new row waits to join it.
        """
        layer, head, slot = at
        blocks = self.pages.block_ids(layer, head, [slot, *self.waiting(*at).tolist()])
        if all(map(self._store.resident, blocks)):
            self.split(*at, row)
        else:
            alone = self._found(layer, head, row, key, int(self.partition[at]))
            self.variance[alone], self.parent[alone] = 0.0, slot

    def _found(self, layer: int, head: int, rows: Block, key: Float32, partition: int) -> At:
        at = (layer, head, self._free(layer, head))
        self.key[at], self.variance[at] = mean_and_variance(key)
        self.value[at] = self._values(layer, head, rows).mean(0)
        self.size[at], self.partition[at] = len(rows), partition
        self._place(at, rows, len(rows) - 1)
        self._update(layer, head, {at[2]: rows})
        return at

    def _place(self, at: tuple[int, int, int | NDArray], block: Block, newest: int | NDArray) -> None:
        for name in ROW_FIELDS:
            getattr(self, name)[at] = getattr(block, name)[0, newest]

    def _values(self, layer: int, head: int, block: Block) -> Float32:
        return dequantize(block.value, head_of(self._cache.value_scale(layer), head))[0]

    def _update(self, layer: int, head: int, parts: dict[int, Block], into: int = NONE, gone: int = NONE) -> None:
        home = np.where(self.pages.rows[layer, head].any(1), np.arange(self.slots), NONE).astype(np.int32)
        if gone != NONE and home[gone] != NONE:
            home[gone] = into
        self.pages.update(self._store, layer, head, home, parts)

    # splitting, merging and removing clusters

    def waiting(self, layer: int, head: int, slot: int) -> Int64:
        return np.flatnonzero(self.parent[layer, head] == slot)

    def split(self, layer: int, head: int, slot: int, newcomer: Block | None = None) -> None:
        """Split a cluster in two, after adding the row and the clusters that wait to join it (Alg. 1, lines 12 to 17)."""
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
        at, waiting = (layer, head, slot), self.parent[layer, head]
        self.partition[at] = self.parent[at] = NONE
        self.size[at] = 0
        waiting[waiting == slot] = NONE

    def _merge(self, layer: int, head: int) -> None:
        unit, partition = units(self.key[layer, head]), self.partition[layer, head]
        pairs = nearest_pairs(unit, partition, max(1, self.slots // MERGE_FRACTION))
        size = self.size[layer, head]
        for first, second in pairs or nearest_pairs(unit, np.zeros_like(partition), 1):
            self._join(layer, head, *((first, second) if size[first] >= size[second] else (second, first)))
            self.merged += 1

    def _join(self, layer: int, head: int, into: int, gone: int) -> None:
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
        """Return one block per head with a row for each cluster, in the cache's dtype."""
        return [self._representatives(layer, head) for head in range(self._cache.kv_heads)]

    def _representatives(self, layer: int, head: int) -> Block:
        cache, live = self._cache, self.live(layer, head)
        key = rotate(self.key[layer, head, live], self.position[layer, head, live], cache.frequencies(layer), cache.pair_axis)
        return Block(
            self._stored(key, head_of(cache.key_scale(layer), head)),
            self._stored(self.value[layer, head, live], head_of(cache.value_scale(layer), head)),
            *[getattr(self, name)[layer, head, live][None] for name in ROW_FIELDS],
        )

    def _stored(self, rows: Float32, scale: Float32 | None) -> NDArray[np.number]:
        return rows[None].astype(self._cache.dtype) if scale is None else codes(rows[None], scale)

    def choose(self, layer: int, head: int, query: Float32, partitions: int, rows: int) -> Int64:
        """Choose clusters in order of the attention that a query gives them, until they hold ``rows`` rows in total. Return
        the slots of these clusters, best first.

        ``query``: the un-rotated queries of one head, ``[r, D]``. ``partitions``: the number of partitions to search, namely
        those whose mean keys get the most attention; lower numbers win ties. Clusters of one row are skipped: their
        representative is that row. Newer clusters win ties.
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
    """Return the mean attention that each key receives from a query's rows, float32 ``[k]``.

    ``query``: ``[r, D]``. ``key``: ``[k, D]``.
    """
    score = query @ key.T / np.float32(np.sqrt(key.shape[1]))
    score = np.exp(score - score.max(1, keepdims=True))
    of_rows: Float32 = (score / score.sum(1, keepdims=True)).mean(0)
    return of_rows


@dataclass
class Mosaic(Retrieval):
    """Cluster frames into partitions by their features, and keys within each partition. A query fetches the clusters that it
    attends to.

    Every query attends to the newest tokens and to a representative of each cluster. The budget |M| is split into a window of
    the newest tokens, the index, and a working set for representatives and fetched clusters.

    Ours: partitions are not split. A frame that would push a partition over its threshold starts a new partition. A query has
    no image features, so partitions are ranked by the query's attention to their mean keys. Keys are compared un-rotated. When
    the fixed-size index is full, the nearest clusters merge. If a cluster is larger than the working set, its newest rows and
    an even sample of its other rows are fetched.
    """

    partitions: int = setting(8, "number of partitions that a query searches, per layer and KV head", at_least=1)
    tight: float = setting(
        0.5, "maximum variance of a small cluster, relative to the layer's early variance (tau_s)", at_least=0
    )
    loose: float = setting(
        1.0, "maximum variance of a large cluster, relative to the layer's early variance (tau_l)", at_least=0
    )

    name: ClassVar[str] = "mosaic"
    paper: ClassVar[str] = "Mosaic, secs. V to VII"
    state_fields = (*Retrieval.state_fields, "clusters", "visual")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tight > self.loose:
            raise ValueError("loose must be at least tight")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, features=True)

    def open(self, cache: KVCache, store: Store) -> None:
        """Create the index. Raises UserError if the index is too small for two clusters in each layer and head."""
        super().open(cache, store)
        self._visual_bytes = self.index_bytes // VISUAL
        left, of = self.index_bytes - self._visual_bytes, cache.layers * cache.kv_heads
        slots = min(left // (of * MosaicClusters.slot_bytes(cache)), self.working_rows // 2)
        if slots < 2:
            raise self.no_room("two clusters")
        self._frames = self.window_rows // (1 if self.shape.thinned else self.shape.tokens_per_frame) + 2
        self.clusters = MosaicClusters(cache, store, slots, self.tight, self.loose)
        self.visual: Partitions | None = None  # created once the first features give the width

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        super().after_append(layers, appended)
        assert appended.features is not None, "a session gives what a policy needs"
        visual = self.visual = self.visual or self._partitions(appended.features.shape[1])
        for into, gone in visual.take(np.unique(appended.frame), appended.features):
            self.clusters.relabel(into, gone)
        self._refresh()

    def _partitions(self, width: int) -> Partitions:
        slots = max(1, min(self._visual_bytes // Partitions.slot_bytes(width), self.clusters.slots // 2))
        return Partitions(slots, width, self._frames, SCENE * self.tight, SCENE * self.loose)

    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        block = block_of(cache, layer, by_seq(cache, layer, leaving))
        self.forget_lost()
        self.clusters.take(layer, block, self.visual.of(block.frame[0]) if self.visual else np.zeros(len(block), np.int32))
        self._refresh()

    def _refresh(self) -> None:
        if self.clusters.changed:
            self.working.forget()
            self.clusters.changed = False

    def always(self, layer: int) -> Sequence[Block]:
        """Return a representative for each cluster, at the position of the cluster's newest member."""
        return self.clusters.representatives(layer)

    def choose(self, layer: int, query: Float32, phase: Phase) -> Chosen:
        self.forget_lost()
        if phase == "prefill":
            self._refresh()
            return [[]] * self.cache.kv_heads
        slots, clusters = self._clusters(layer, query), self.clusters
        waiting = [(h, slot) for h, of in enumerate(slots) for slot in of.tolist() if len(clusters.waiting(layer, h, slot))]
        for head, slot in waiting:
            clusters.split(layer, head, slot)
        self._refresh()
        blocks, left = self._blocks(layer, self._clusters(layer, query) if waiting else slots)
        self.working.truncated += left
        return blocks

    def look_ahead(self, layer: int, query: Float32, phase: Phase) -> None:
        if phase != "prefill":
            blocks, _ = self._blocks(layer, self._clusters(layer, query))
            self.store.prefetch(sorted({number for of_head in blocks for number in of_head}))

    def _clusters(self, layer: int, query: Float32) -> list[Int64]:
        bare = self.unrotated(query).reshape(self.cache.kv_heads, -1, query.shape[2])
        return [
            self.clusters.choose(layer, head, of, self.partitions, self._free_rows(layer, head)) for head, of in enumerate(bare)
        ]

    def _free_rows(self, layer: int, head: int) -> int:
        return self.working_rows - len(self.clusters.live(layer, head))

    def _blocks(self, layer: int, slots: Sequence[Int64]) -> tuple[list[list[int]], int]:
        pages = self.clusters.pages
        found = [pages.blocks_of(layer, head, of, self._free_rows(layer, head)) for head, of in enumerate(slots)]
        return [numbers for numbers, _ in found], sum(left for _, left in found)

    @property
    def merged(self) -> int:
        """The number of clusters and partitions that were merged because the index was full."""
        return self.clusters.merged + (self.visual.merged if self.visual else 0)

    def forget_lost(self) -> None:
        self.clusters.forget_lost()

    def restore(self, state: State) -> None:
        if "visual.mean" in state:
            self.visual = self._partitions(state["visual.mean"].shape[1])
        super().restore(state)
        self.clusters.changed = True
