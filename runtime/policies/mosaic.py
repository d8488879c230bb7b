"""Mosaic: clusters of keys inside clusters of frames, fetched by the query. Its paper's secs. V to VII and Alg. 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime.policies.base import Appended, Bool, Float32, Needs, setting
from edgevlm.runtime.policies.retrieval import Chosen, Retrieval, block_of, by_seq
from edgevlm.runtime.retrieval.cosine_clusters import Partitions
from edgevlm.runtime.retrieval.mosaic_clusters import Int64, MosaicClusters
from edgevlm.runtime.retrieval.working_set import Phase
from edgevlm.runtime.stateful import State
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

VISUAL = 8  # the partitions of frames take at most one in so many bytes of the index
SCENE = 2.0  # frames may vary so much more than keys: their early variance is that of one scene


@dataclass
class Mosaic(Retrieval):
    """Cluster frames by their features and keys within each such partition; a query fetches the clusters it attends to.

    A representative of every cluster and the newest tokens are always attended to. |M| is split into a window of the newest
    tokens, the index, and a working set for representatives and clusters.

    Ours: partitions are not split; a frame that would exceed the threshold starts another. A query has no image features, so
    partitions are compared by mean keys, with softmax attention to the representatives. Keys are compared un-rotated. The
    index has a fixed size: when it is full the nearest clusters merge. Of a cluster larger than the working set a part is
    fetched: the newest rows, and older ones evenly spread.
    """

    partitions: int = setting(8, "partitions that a query searches, per layer and KV head", at_least=1)
    tight: float = setting(0.5, "largest variance of a small cluster, times the layer's early variance (tau_s)", at_least=0)
    loose: float = setting(1.0, "largest variance of a large cluster, times the layer's early variance (tau_l)", at_least=0)

    name: ClassVar[str] = "mosaic"
    paper: ClassVar[str] = "Mosaic, secs. V to VII"
    state_fields = (*Retrieval.state_fields, "clusters", "visual")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tight > self.loose:
            raise ValueError("loose must be no less than tight")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, features=True)

    def open(self, cache: KVCache, store: Store) -> None:
        """Raises UserError for an index too small for two clusters in each layer and head."""
        super().open(cache, store)
        self._visual_bytes = self.index_bytes // VISUAL
        left, of = self.index_bytes - self._visual_bytes, cache.layers * cache.kv_heads
        slots = min(left // (of * MosaicClusters.slot_bytes(cache)), self._working_rows // 2)
        if slots < 2:
            raise self.no_room("two clusters")
        self._frames = self.window_rows // (1 if self.shape.thinned else self.shape.tokens_per_frame) + 2
        self.clusters = MosaicClusters(cache, store, slots, self.tight, self.loose)
        self.visual: Partitions | None = None  # made when the first features say how wide they are

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        super().after_append(cache, appended)
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
        """The working set is filled anew when the clusters are others."""
        if self.clusters.changed:
            self.working.forget()
            self.clusters.changed = False

    def always(self, layer: int) -> Sequence[Block]:
        """The representatives of all clusters, each where its newest member stands."""
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
        """For each KV head the slots that a rotated query ``[heads, S, head_dim]`` of the call at hand asks for."""
        bare = self.unrotated(query).reshape(self.cache.kv_heads, -1, query.shape[2])
        return [
            self.clusters.choose(layer, head, of, self.partitions, self._free_rows(layer, head)) for head, of in enumerate(bare)
        ]

    def _free_rows(self, layer: int, head: int) -> int:
        """Rows of the working set that representatives leave."""
        return self._working_rows - len(self.clusters.live(layer, head))

    def _blocks(self, layer: int, slots: Sequence[Int64]) -> tuple[list[list[int]], int]:
        """For each KV head the blocks of these slots that fit in the working set, and the rows left out."""
        pages = self.clusters.pages
        found = [pages.blocks_of(layer, head, of, self._free_rows(layer, head)) for head, of in enumerate(slots)]
        return [numbers for numbers, _ in found], sum(left for _, left in found)

    @property
    def merged(self) -> int:
        """Clusters, and partitions of frames, that became one with another because there was no room."""
        return self.clusters.merged + (self.visual.merged if self.visual else 0)

    def forget_lost(self) -> None:
        self.clusters.forget_lost()

    def restore(self, state: State) -> None:
        if "visual.mean" in state:
            self.visual = self._partitions(state["visual.mean"].shape[1])
        super().restore(state)
        self.clusters.changed = True
