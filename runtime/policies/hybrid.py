"""Hybrid: eviction in the arena, and below it what was evicted, the newest of everything that looks alike. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.policies.base import Bool, Float32, Policy
from edgevlm.runtime.policies.last_seen import LastSeen
from edgevlm.runtime.policies.retrieval import Retrieval, block_of
from edgevlm.runtime.policies.sliding_window import SlidingWindow
from edgevlm.runtime.retrieval.alike import AlikeIndex
from edgevlm.runtime.retrieval.stats import Phase
from edgevlm.runtime.retrieval.unrotated import unrotated_keys
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Int64 = NDArray[np.int64]


@dataclass
class Hybrid(Retrieval):
    """Evict in the arena as ``last-seen`` does, keep below the newest of what looked alike, and fetch what a question asks for.

    A token that leaves the arena joins the cluster of evicted tokens whose mean key in the deepest layer is most like its own
    (cosine, un-rotated), or founds one. Of each cluster the newest tokens stay below, in all layers. For a question, each layer
    and KV head fetches the clusters c of the largest sum over the question's rows and the head's query group of
    softmax_c(q . mean key of c / sqrt(D)).

    window: the share of |M| that the arena has. index: the share of |M|, in bytes, that the clusters' mean keys take; the rest
    is the working set. rows: tokens that a block of a cluster holds at most; of each cluster two blocks stay. tau: the cosine
    from which tokens are alike, as long as the index is not full. evict: what evicts, ``last-seen`` or ``sliding-window``.

    Ours: all of it; there is no paper.
    """

    window: float = 0.65
    index: float = 0.15
    rows: int = 2
    tau: float = 0.95
    evict: Literal["last-seen", "sliding-window"] = "last-seen"

    name: ClassVar[str] = "hybrid"
    paper: ClassVar[str] = "ours, docs/longstreams.md"
    state_fields = (*Retrieval.state_fields, "_alike", "lost")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1 or not 0 < self.tau <= 1:
            raise ValueError("rows is 1 or more and tau lies in (0, 1]")

    def arena_policy(self) -> Policy:
        return LastSeen() if self.evict == "last-seen" else SlidingWindow()

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._alike = AlikeIndex(cache.layers, cache.kv_heads * cache.head_dim, self.index_bytes, self.tau)
        if self._alike.capacity < 2:
            raise UserError(
                f"policy {self.name}: a budget of {self.budget} tokens leaves {self.index_bytes} bytes for the index, less "
                "than two clusters; give a larger --budget, or index="
            )
        self._leaving: list[Block] = []  # of one compression, layer by layer
        none: Sequence[Sequence[int]] = [()] * cache.kv_heads
        self._chosen = [none] * cache.layers  # by the question that is being answered
        self.lost = 0  # blocks that left the index, ever

    # Rows leave.

    def archive(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        rows = np.nonzero(leaving)[1].reshape(cache.kv_heads, -1)
        rows = np.take_along_axis(rows, np.argsort(np.take_along_axis(cache.seq(layer), rows, 1), 1), 1)
        self._leaving.append(block_of(cache, layer, rows))
        if layer == cache.layers - 1:
            self._settle(cache)

    def _settle(self, cache: KVCache) -> None:
        """The same tokens have left every layer: cluster them, and keep the newest of each cluster."""
        keys = np.stack([unrotated_keys(cache, layer, block) for layer, block in enumerate(self._leaving)])
        flat = keys.transpose(0, 2, 1, 3).reshape(cache.layers, keys.shape[2], -1)
        clusters, dropped = self._alike.join(flat)
        for cluster in np.unique(clusters).tolist():
            self._extend(cluster, np.flatnonzero(clusters == cluster)[-self.rows :], dropped)
        self.store.drop(dropped)
        self._leaving = []
        self.forget_lost()

    def _extend(self, cluster: int, tokens: Int64, dropped: list[int]) -> None:
        """Put tokens of this compression, no more than a block holds, behind the others of a cluster; what is over goes."""
        extents, rows = self._alike.extents[cluster], self._alike.rows[cluster]
        parts = [block[tokens] for block in self._leaving]
        if extents[1] < 0 or rows[1] + len(tokens) > self.rows:
            dropped += range(extents[0], extents[0] + len(parts)) if extents[0] >= 0 else ()
            numbers = [self.store.put(part) for part in parts]
            extents[:], rows[:] = (extents[1], numbers[0]), (rows[1], len(tokens))
        else:
            for layer, part in enumerate(parts):
                self.store.append(int(extents[1]) + layer, part)
            rows[1] += len(tokens)

    def forget_lost(self) -> None:
        """A run of blocks of which one is lost leaves all layers."""
        for number in self.store.lost():
            self.store.drop(self._alike.forget(number))
            self.lost += 1

    # Rows are asked for.

    def choose(self, layer: int, query: Float32, phase: Phase) -> Sequence[Sequence[int]]:
        if phase == "prefill" or not self._alike.clusters:
            return [()] * self.cache.kv_heads
        if phase == "question":
            self._chosen[layer] = self._best(layer, self.unrotated(query))
        return self._chosen[layer]

    def _best(self, layer: int, query: Float32) -> Sequence[Sequence[int]]:
        """Blocks for each KV head, best cluster first and its newest block before the other, until the working set is full."""
        heads, count, width = self.cache.kv_heads, self._alike.clusters, self.cache.head_dim
        mean = self._alike.means(layer).reshape(count, heads, width)
        grouped = query.reshape(heads, -1, width)
        out: list[list[int]] = []
        for head in range(heads):
            logits = grouped[head] @ mean[:, head].T / np.sqrt(width)
            weights = np.exp(logits - logits.max(1, keepdims=True))
            score = (weights / weights.sum(1, keepdims=True)).sum(0)
            order = np.argsort(-score, kind="stable")
            have = self._alike.rows[order].sum(1).cumsum()
            order = order[: int(np.searchsorted(have, self.working_rows)) + 1]
            first = self._alike.extents[order, ::-1].ravel()
            out.append((first[first >= 0] + layer).tolist())
        return out

    @property
    def merged(self) -> int:
        """Clusters that were merged into another because the index was full."""
        return self._alike.merged
