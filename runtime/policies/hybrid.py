"""Hybrid: eviction on the device, and in a store the newest evicted tokens of everything that looks alike. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime.policies.base import Float32, setting
from edgevlm.runtime.policies.last_seen import LastSeen
from edgevlm.runtime.policies.retrieval import Chosen, Int64, QuestionRetrieval
from edgevlm.runtime.retrieval.working_set import unrotated_keys
from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


NO_COSINE = -2.0  # a cosine below all
CODES = 32  # of a mean that have one scale, so that a channel of large numbers costs its neighbours only their precision


class ClusterIndex(Stateful):
    """Up to ``capacity`` clusters, allocated once, ``entry_bytes`` each.

    A token joins the cluster whose mean key in the deepest layer has the highest cosine with its own, if that is ``tau`` or
    more, else it founds one. When there is no free place, the two most similar clusters merge first, and ``tau`` falls to their
    cosine.

    A mean is kept as int8 codes ``[layers, capacity, width]``, with a float16 ``scale`` for each CODES of them; changes below
    half a code are lost, so it settles after a few dozen tokens. runs ``[capacity, 2]``: the first numbers of the two runs of
    blocks, one block a layer, with the cluster's newest tokens, the newer last, -1 for none; rows: their tokens. near, nearest
    ``[capacity]``: the highest cosine with another cluster, and that cluster.
    """

    PARTS = ("count", "runs", "rows", "near", "nearest")

    state_fields = (*PARTS, "codes", "scale", "clusters", "merged", "tau")

    def __init__(self, layers: int, width: int, most_bytes: int, tau: float) -> None:
        self.capacity, self._layers = most_bytes // self.entry_bytes(layers, width), layers
        self.codes = np.zeros((layers, self.capacity, width), np.int8)
        self.scale = np.zeros((layers, self.capacity, _scales(width)), np.float16)
        self.count = np.zeros(self.capacity, np.int64)
        self.runs = np.full((self.capacity, 2), -1, np.int64)
        self.rows = np.zeros((self.capacity, 2), np.int32)
        self.near, self.nearest = np.full(self.capacity, NO_COSINE, np.float32), np.zeros(self.capacity, np.int32)
        self.clusters, self.merged, self.tau = 0, 0, tau

    @staticmethod
    def entry_bytes(layers: int, width: int) -> int:
        return layers * (width + 2 * _scales(width)) + 40

    def means(self, layer: int) -> Float32:
        """The mean keys of a layer, ``[clusters, width]``."""
        return self._dequantize(np.s_[layer, : self.clusters])

    def join(self, keys: Float32) -> tuple[Int64, list[int]]:
        """Add tokens ``[layers, n, width]`` one by one; returns the cluster of each, ``[n]``, and blocks to drop."""
        joined, dropped = np.zeros(keys.shape[1], np.int64), list[int]()
        unit = np.zeros(self.codes.shape[1:], np.float32)  # of the means of the deepest layer
        unit[: self.clusters] = _unit(self.means(-1))
        own = _unit(keys[-1])
        cosine = own @ unit.T  # [n, capacity], kept up with what becomes of the clusters
        for token, similar in enumerate(cosine):
            if self.clusters == self.capacity and float(similar.max()) < self.tau:
                kept, gone, numbers = self._merge(unit)
                dropped += numbers
                joined[:token][joined[:token] == gone] = kept
                joined[:token][joined[:token] == self.clusters] = gone  # the last cluster has taken the place
                cosine[:, [kept, gone]] = own @ unit[[kept, gone]].T
            at = int(similar[: self.clusters].argmax()) if self.clusters else 0
            if not self.clusters or float(similar[at]) < self.tau:
                at = self.clusters
                self.clusters += 1
                self.count[at], self.runs[at], self.rows[at], self.near[at] = 0, -1, 0, NO_COSINE
            self.count[at] += 1
            if self._move(at, keys[:, token], 1 / self.count[at], unit):
                cosine[:, at] = own @ unit[at]
                self._update_nearest(at, unit)
            joined[token] = at
        return joined, dropped

    def drop_run(self, number: int) -> list[int]:
        """Remove the run of a lost block; returns the numbers of its blocks in all layers."""
        first = self.runs
        at = (first >= 0) & (first <= number) & (number < first + self._layers)
        gone = [block for start in first[at].tolist() for block in range(start, start + self._layers)]
        self.rows[at], self.runs[at] = 0, -1
        return gone

    def _merge(self, unit: Float32) -> tuple[int, int, list[int]]:
        one = int(self.near[: self.clusters].argmax())
        self.tau, self.merged = min(self.tau, float(self.near[one])), self.merged + 1
        one, other = sorted((one, int(self.nearest[one])))
        self.count[one] += self.count[other]
        self._move(one, self._dequantize(np.s_[:, other]), self.count[other] / self.count[one], unit)
        numbers = np.concatenate([self.runs[one], self.runs[other]])
        rows = np.concatenate([self.rows[one], self.rows[other]])
        *dropped, older, newer = np.argsort(numbers, kind="stable").tolist()  # blocks are numbered as they were begun
        self.runs[one], self.rows[one] = numbers[[older, newer]], rows[[older, newer]]
        self.clusters = last = self.clusters - 1
        for part in (*(getattr(self, name) for name in self.PARTS), unit):
            part[other] = part[last]
        for part in (self.codes, self.scale):
            part[:, other] = part[:, last]
        nearest = self.nearest[:last]
        alone = np.flatnonzero((nearest == one) | (nearest == other)).tolist()
        nearest[nearest == last] = other
        for cluster in alone:
            self._find_nearest(cluster, unit)
        self._update_nearest(one, unit)
        return one, other, [first + layer for first in numbers[dropped].tolist() if first >= 0 for layer in range(self._layers)]

    def _update_nearest(self, at: int, unit: Float32) -> None:
        cosine, near, nearest = self._find_nearest(at, unit), self.near[: self.clusters], self.nearest[: self.clusters]
        farther = np.flatnonzero((nearest == at) & (cosine < near)).tolist()
        nearer = cosine > near
        nearer[at] = False
        near[nearer], nearest[nearer] = cosine[nearer], at
        for cluster in farther:
            if cluster != at:
                self._find_nearest(cluster, unit)

    def _find_nearest(self, at: int, unit: Float32) -> Float32:
        cosine: Float32 = unit[: self.clusters] @ unit[at]
        cosine[at] = NO_COSINE
        self.nearest[at] = cosine.argmax()
        self.near[at] = cosine[self.nearest[at]]
        return cosine

    def _move(self, at: int, keys: Float32, fraction: float, unit: Float32) -> bool:
        """Move a mean by ``fraction`` towards ``keys`` ``[layers, width]``. Returns whether the deepest layer's has changed."""
        mean = self._dequantize(np.s_[:, at])
        mean += np.float32(fraction) * (keys - mean)
        parts = mean.reshape(*self.scale[:, at].shape, -1)
        scale = np.minimum(np.abs(parts).max(2) / 127, np.finfo(np.float16).max).astype(np.float16)
        codes = parts / np.maximum(scale.astype(np.float32), np.float32(1e-30))[..., None]
        self.scale[:, at], self.codes[:, at] = scale, np.clip(np.rint(codes), -127, 127).reshape(mean.shape)
        before, unit[at] = unit[at].copy(), _unit(self._dequantize(np.s_[-1, at]))
        return not np.array_equal(before, unit[at])

    def _dequantize(self, which: tuple[slice | int, ...]) -> Float32:
        scale = self.scale[which].astype(np.float32)
        numbers: Float32 = np.repeat(scale, self.codes.shape[2] // self.scale.shape[2], -1) * self.codes[which]
        return numbers


def _scales(width: int) -> int:
    return width // CODES if width % CODES == 0 else 1


def _unit(x: Float32) -> Float32:
    unit: Float32 = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-30))
    return unit


@dataclass
class Hybrid(QuestionRetrieval):
    """Evict like ``last-seen``, store the newest evicted tokens that look alike, and fetch what a question needs.

    A token that leaves the arena joins the cluster of evicted tokens whose mean key in the deepest layer is most like its own
    (cosine, un-rotated), or founds one. The newest tokens of each cluster stay in the store, in all layers. For a question,
    each layer and KV head fetches the clusters c of the largest sum over the question's rows and the head's query group of
    softmax_c(q . mean key of c / sqrt(D)).

    Ours: there is no paper.
    """

    window: float = setting(0.65, "fraction of |M| for the cache that evicts", above=0, below=1)
    index: float = setting(
        0.15, "fraction of |M|, in fp32 bytes, for clusters' mean keys; the rest is the working set", above=0, below=1
    )
    rows: int = setting(2, "most tokens per block; two blocks of each cluster are kept", at_least=1)
    tau: float = setting(0.95, "cosine from which tokens are alike until the index is full", above=0, at_most=1)

    name: ClassVar[str] = "hybrid"
    paper: ClassVar[str] = "ours, docs/internals/long-streams.md"
    state_fields = (*QuestionRetrieval.state_fields, "_clusters")

    arena_policy = LastSeen

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._clusters = ClusterIndex(cache.layers, cache.kv_heads * cache.head_dim, self.index_bytes, self.tau)
        if self._clusters.capacity < 2:
            raise self.no_room("two clusters")

    def take_in(self, blocks: Sequence[Block]) -> None:
        """Cluster the tokens, which are the same in every layer, and keep the newest of each cluster."""
        keys = np.stack([unrotated_keys(self.cache, layer, block) for layer, block in enumerate(blocks)])
        clusters, dropped = self._clusters.join(keys.transpose(0, 2, 1, 3).reshape(len(blocks), keys.shape[2], -1))
        for cluster in np.unique(clusters).tolist():
            newest = np.flatnonzero(clusters == cluster)[-self.rows :]
            dropped += self._extend(cluster, [block[newest] for block in blocks])
        self.store.drop(dropped)

    def _extend(self, cluster: int, parts: Sequence[Block]) -> Sequence[int]:
        runs, rows, count = self._clusters.runs[cluster], self._clusters.rows[cluster], len(parts[0])
        if runs[1] < 0 or rows[1] + count > self.rows:
            dropped = range(runs[0], runs[0] + len(parts)) if runs[0] >= 0 else range(0)
            numbers = [self.store.put(part) for part in parts]
            runs[:], rows[:] = (runs[1], numbers[0]), (rows[1], count)
            return dropped
        for layer, part in enumerate(parts):
            self.store.append(int(runs[1]) + layer, part)
        rows[1] += count
        return range(0)

    def forget_lost(self) -> None:
        """A run of blocks of which one is lost leaves all layers."""
        for number in self.store.lost():
            self.store.drop(self._clusters.drop_run(number))
            self.lost += 1

    def rank(self, layer: int, query: Float32) -> Chosen:
        """Best cluster first, and its newest block before the other, until the working set is full."""
        index, heads, width = self._clusters, self.cache.kv_heads, self.cache.head_dim
        mean = index.means(layer).reshape(index.clusters, heads, width)
        ranked: list[list[int]] = []
        for head, asked in enumerate(query.reshape(heads, -1, width)):
            logits = asked @ mean[:, head].T / np.sqrt(width)
            weights = np.exp(logits - logits.max(1, keepdims=True))
            order = np.argsort(-(weights / weights.sum(1, keepdims=True)).sum(0), kind="stable")
            have = index.rows[order].sum(1).cumsum()
            first = index.runs[order[: int(np.searchsorted(have, self.working_rows)) + 1], ::-1].ravel()
            ranked.append((first[first >= 0] + layer).tolist())
        return ranked

    @property
    def merged(self) -> int:
        """Clusters that were merged into another because the index was full."""
        return self._clusters.merged
