"""Last seen: of everything that looks alike, what was seen last stays. Ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.attention import SeqScores
from edgevlm.runtime.policies.base import Bool, Context, Float32, SteadyTarget, StreamShape, setting

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class LastSeen(SteadyTarget):
    """Keep the tokens least similar to any later token, by the deepest layer's keys.

    u_t = max over the tokens s that came after t of cos(k_t, k_s), keys un-rotated, averaged over heads; the lowest u stay, in
    all layers alike. The newest token has u = -1. Tokens that have left still count among the later ones.

    Ours: there is no paper.
    """

    target: float = setting(0.75, "|C| / |M|", above=0, at_most=1)

    name: ClassVar[str] = "last-seen"
    paper: ClassVar[str] = "ours, docs/internals/last-seen.md"
    state_fields = ("_known", "_since")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._known = SeqScores()  # 1 + u
        self._since = 0  # the first token that no other has been compared with

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        score, ranked = self._novelty(cache), cache.seq(self.shape.layers - 1)
        shared: dict[int, Bool] = {}  # target -> what stays in all layers that hold the rows that were scored
        keep = {}
        for layer, target in targets.items():
            seq = cache.seq(layer)
            if np.array_equal(seq, ranked):
                if target not in shared:
                    shared[target] = _best(cache, layer, score, target)
                keep[layer] = shared[target]
            else:  # someone else has evicted; what the layer that ranks has lost goes first
                at = kernels.index_of(seq, ranked)
                known = np.take_along_axis(score, np.maximum(at, 0), 1)
                keep[layer] = _best(cache, layer, np.where(at < 0, np.float32(-np.inf), known), target)
        return keep

    def _novelty(self, cache: KVCache) -> Float32:
        """-u of each row of the deepest layer, ``[kv_heads, n]``: those held meet what came since the last compression."""
        layer = self.shape.layers - 1
        seq, valid = cache.seq(layer), cache.kind(layer) == Kind.VISION
        known = np.maximum(self._known.get(seq), 1 + kernels.newer_similarity(cache, layer, valid, self._since))
        self._known.replace(seq, known, int(cache.capacities[layer]))
        self._since = int(seq.max()) + 1
        likeness = (known - 1).astype(np.float32)
        return -np.broadcast_to(likeness.mean(0, dtype=np.float64).astype(np.float32), likeness.shape)


def _best(cache: KVCache, layer: int, score: Float32, target: int) -> Bool:
    """The prefix of a layer and its ``target`` vision rows of the highest score."""
    kind = cache.kind(layer)
    return (kind == Kind.PREFIX) | kernels.top_k(score, cache.seq(layer), kind == Kind.VISION, target)
