"""H2O: heavy hitters by accumulated attention, and the newest tokens. arXiv 2306.14048."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.attention import SeqScores
from edgevlm.runtime.policies.base import Appended, Bool, EvictsOnDemand, Needs, StreamShape, newest, setting, tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgevlm.runtime.cache import KVCache
    from edgevlm.runtime.policies.base import Context


@dataclass
class H2O(EvictsOnDemand):
    """Keep the newest tokens and those that have received the most attention from all later rows.

    F_t += sum over the rows i of each appended piece of softmax(q_i K^T / sqrt(D))_t, summed over the query heads of a KV
    head; each KV head keeps its own top of F.

    Ours: one choice per KV head; all frames of an append are scored before anything is evicted, where the paper evicts one
    token for every new one; rows of questions and answers do not count, because they never change the memory.
    """

    recent: float = setting(0.5, "fraction of |C| for the newest tokens; the rest are heavy hitters", at_least=0, at_most=1)

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    state_fields = ("_scores",)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._scores = {layer: SeqScores() for layer in range(shape.layers)}

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=tuple(range(self.shape.layers)))

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        for layer, query in appended.queries.items():
            key, seq, known = cache.key(layer), cache.seq(layer), self._scores[layer]
            mass = kernels.attention_mass(query, appended.seq, key, seq, scale=cache.key_scale(layer))
            known.replace(seq, known.get(seq) + mass, int(cache.capacities[layer]))

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        keep = {}
        for layer, target in targets.items():
            seq, fixed, count = cache.seq(layer), self.protected(cache, layer), tokens_of(self.recent, target)
            fixed |= newest(seq, ~fixed, count)
            score = self._scores[layer].get(seq).astype(np.float32)
            keep[layer] = fixed | kernels.top_k(score, seq, ~fixed, target - count)
        return keep
