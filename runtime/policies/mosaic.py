"""Mosaic: clusters of keys inside clusters of frames, fetched by the query. Its paper's secs. V to VII and Alg. 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.policies.base import Appended, Bool, Float32, Needs, setting
from edgevlm.runtime.policies.retrieval import Retrieval, leaving_block
from edgevlm.runtime.retrieval.cluster_pages import ClusterPages
from edgevlm.runtime.retrieval.cluster_table import ClusterTable, Int64, choose_clusters
from edgevlm.runtime.retrieval.cluster_updater import ClusterUpdater
from edgevlm.runtime.retrieval.partitions import Partitions
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

    prefetch: bool = setting(True, "prefetch for layer l + 1 with layer l's query")
    partitions: int = setting(8, "partitions that a query searches, per layer and KV head", at_least=1)
    tight: float = setting(
        0.5, "largest variance of a small cluster, times the layer's early variance (tau_s, eq. 5)", at_least=0
    )
    loose: float = setting(
        1.0, "largest variance of a large cluster, times the layer's early variance (tau_l, eq. 5)", at_least=0
    )

    name: ClassVar[str] = "mosaic"
    paper: ClassVar[str] = "Mosaic, secs. V to VII"
    state_fields = (*Retrieval.state_fields, "table", "updater", "visual")
    _scratch_fields = (*Retrieval._scratch_fields, "prefetched")

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
        slots = min(left // (of * (ClusterTable.slot_bytes(cache) + ClusterPages.slot_bytes())), self._working_rows // 2)
        if slots < 2:
            raise UserError(
                f"a budget of {self.budget} tokens leaves mosaic no room for two clusters; "
                f"give --budget {-(-self.budget * 4 // max(1, 2 * slots))} or more, or a larger index="
            )
        self._frames = self.window_rows // (1 if self.shape.thinned else self.shape.tokens_per_frame) + 2
        self.table = ClusterTable(cache, slots)
        self.updater = ClusterUpdater(cache, store, self.table, small=self.tight, large=self.loose)
        self.visual: Partitions | None = None  # made when the first features say how wide they are
        self._predicted: dict[int, list[list[int]]] = {}
        self.prefetched = np.zeros(2, np.int64)  # blocks chosen that were, and were not, got ahead

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        super().after_append(cache, appended)
        self.updater.compact()
        assert appended.features is not None, "a session gives what a policy needs"
        visual = self.visual = self.visual or self._partitions(appended.features.shape[1])
        for into, gone in visual.take(np.unique(appended.frame), appended.features):
            self.updater.relabel(into, gone)
        self._refresh()

    def _partitions(self, width: int) -> Partitions:
        slots = max(1, min(self._visual_bytes // Partitions.slot_bytes(width), self.table.slots // 2))
        return Partitions(slots, width, self._frames, SCENE * self.tight, SCENE * self.loose)

    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        block = leaving_block(cache, layer, leaving)
        self.forget_lost()
        of = self.visual.of(block.frame[0]) if self.visual else np.zeros(len(block), np.int32)
        self.updater.take(layer, block, of)
        self._refresh()

    def _refresh(self) -> None:
        """The working set is filled anew when the clusters are others."""
        if self.updater.changed:
            self.working.forget()
            self.updater.changed = False

    def begin(self, cos: Float32, sin: Float32) -> None:
        super().begin(cos, sin)
        self._predicted.clear()

    def always(self, layer: int) -> Sequence[Block]:
        """The representatives of all clusters, each where its newest member stands."""
        return self.table.representatives(layer)

    def choose(self, layer: int, query: Float32, phase: Phase) -> Sequence[Sequence[int]]:
        self.forget_lost()
        if phase == "prefill":
            self._refresh()
            return [[]] * self.cache.kv_heads
        slots = self._clusters(layer, query)
        self._completed(layer, self._blocks(layer, slots)[0])
        waiting = [(h, int(slot)) for h, of in enumerate(slots) for slot in of if len(self.updater.waiting(layer, h, slot))]
        for head, slot in waiting:
            self.updater.split(layer, head, slot)
        self._refresh()
        blocks, left = self._blocks(layer, self._clusters(layer, query) if waiting else slots)
        self.working.truncated += left
        return blocks

    def look_ahead(self, layer: int, query: Float32, phase: Phase) -> None:
        if self.prefetch and phase != "prefill":
            self._predicted[layer] = self._blocks(layer, self._clusters(layer, query))[0]
            self.store.prefetch(sorted({number for of_head in self._predicted[layer] for number in of_head}))

    def _clusters(self, layer: int, query: Float32) -> list[Int64]:
        """For each KV head the slots that a rotated query ``[heads, S, head_dim]`` of the call at hand asks for."""
        heads, held = self.cache.kv_heads, self.updater.pages.held[layer]
        bare = self.unrotated(query).reshape(heads, -1, query.shape[2])
        return [
            choose_clusters(self.table, layer, head, bare[head], self.partitions, held[head], self._free_rows(layer, head))
            for head in range(heads)
        ]

    def _free_rows(self, layer: int, head: int) -> int:
        """Rows of the working set that representatives leave."""
        return self._working_rows - len(self.table.live(layer, head))

    def _blocks(self, layer: int, slots: list[Int64]) -> tuple[list[list[int]], int]:
        """For each KV head the blocks of these slots that fit in the working set, and the rows left out."""
        pages = self.updater.pages
        found = [pages.blocks_of(layer, head, of, self._free_rows(layer, head)) for head, of in enumerate(slots)]
        return [numbers for numbers, _ in found], sum(left for _, left in found)

    def _completed(self, layer: int, blocks: list[list[int]]) -> None:
        """Count what of the choice was foreseen; the rest is fetched now."""
        for chosen, ahead in zip(blocks, self._predicted.pop(layer, []), strict=False):
            found = len({*chosen} & {*ahead})
            self.prefetched += found, len(chosen) - found

    @property
    def merged(self) -> int:
        """Clusters, and partitions of frames, that became one with another because there was no room."""
        return self.updater.counts.merges + (self.visual.merged if self.visual else 0)

    @property
    def counts(self) -> Mapping[str, int]:
        """What the index has been through since the session opened, by name: see UpdateCounts, and of partitions.

        prefetched, completed: blocks chosen that had been read ahead, and that had not.
        """
        visual = (self.visual.founded, self.visual.merged) if self.visual else (0, 0)
        ahead = dict(zip(("prefetched", "completed"), self.prefetched.tolist(), strict=True))
        return {**asdict(self.updater.counts), "partitions": visual[0], "partitions_merged": visual[1], **ahead}

    def forget_lost(self) -> None:
        self.updater.forget_lost()

    def restore(self, state: State) -> None:
        if "visual.mean" in state:
            self.visual = self._partitions(state["visual.mean"].shape[1])
        super().restore(state)
        self.updater.changed = True
