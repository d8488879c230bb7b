"""Hybrid: eviction on the device, and in a store the newest evicted tokens of everything that looks alike. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime.policies.base import Float32, setting
from edgevlm.runtime.policies.last_seen import LastSeen
from edgevlm.runtime.policies.retrieval import QuestionRetrieval
from edgevlm.runtime.retrieval.cluster_index import ClusterIndex
from edgevlm.runtime.retrieval.working_set import unrotated_keys
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class Hybrid(QuestionRetrieval):
    """Evict like ``last-seen``, store the newest evicted tokens that look alike, and fetch what a question needs.

    A token that leaves the arena joins the cluster of evicted tokens whose mean key in the deepest layer is most like its own
    (cosine, un-rotated), or founds one. Of each cluster the newest tokens stay in the store, in all layers. For a question,
    each layer and KV head fetches the clusters c of the largest sum over the question's rows and the head's query group of
    softmax_c(q . mean key of c / sqrt(D)).

    Ours: there is no paper.
    """

    window: float = setting(0.65, "fraction of |M| for the cache that evicts", above=0, below=1)
    index: float = setting(
        0.15, "fraction of |M|, in bytes, for clusters' mean keys; the rest is the working set", above=0, below=1
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
        self.check_index(self._clusters.capacity, "clusters")

    def take_in(self, blocks: Sequence[Block]) -> None:
        """Cluster the tokens, which are the same in every layer, and keep the newest of each cluster."""
        keys = np.stack([unrotated_keys(self.cache, layer, block) for layer, block in enumerate(blocks)])
        clusters, dropped = self._clusters.join(keys.transpose(0, 2, 1, 3).reshape(len(blocks), keys.shape[2], -1))
        for cluster in np.unique(clusters).tolist():
            newest = np.flatnonzero(clusters == cluster)[-self.rows :]
            dropped += self._extend(cluster, [block[newest] for block in blocks])
        self.store.drop(dropped)

    def _extend(self, cluster: int, parts: Sequence[Block]) -> Sequence[int]:
        """Put tokens, no more than a block holds, one block a layer, behind the others of a cluster; returns blocks to drop."""
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

    def rank(self, layer: int, query: Float32) -> Sequence[Sequence[int]]:
        """Best cluster first, and its newest block before the other, until the working set is full."""
        index, heads, width = self._clusters, self.cache.kv_heads, self.cache.head_dim
        mean = index.means(layer).reshape(index.clusters, heads, width)
        grouped = query.reshape(heads, -1, width)
        ranked: list[list[int]] = []
        for head in range(heads):
            logits = grouped[head] @ mean[:, head].T / np.sqrt(width)
            weights = np.exp(logits - logits.max(1, keepdims=True))
            score = (weights / weights.sum(1, keepdims=True)).sum(0)
            order = np.argsort(-score, kind="stable")
            have = index.rows[order].sum(1).cumsum()
            order = order[: int(np.searchsorted(have, self.working_rows)) + 1]
            first = index.runs[order, ::-1].ravel()
            ranked.append((first[first >= 0] + layer).tolist())
        return ranked

    @property
    def merged(self) -> int:
        """Clusters that were merged into another because the index was full."""
        return self._clusters.merged
