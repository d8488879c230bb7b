"""H2O: heavy hitters by accumulated attention, and the newest tokens. arXiv 2306.14048."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.base import Appended, Bool, Float32, Guide, Needs, Policy, StreamShape, newest, tokens_of
from edgevlm.runtime.policies.cross_layer import booster, layer_number
from edgevlm.runtime.policies.scores import SeqScores

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

ROWS = 32  # of a piece scored at a time: bounds the attention matrix that numpy makes


@dataclass
class H2O(Policy):
    """Keep the newest tokens and, of the others, those that all rows since they came attended to most.

    F_t += sum over the rows i of each appended piece of softmax(q_i K^T / sqrt(D))_t, summed over the query heads of a KV
    head; each KV head keeps its own top of F.

    recent: share of the tokens kept that goes to the newest; the rest goes to the heavy hitters. clie: rank by F ||V||, in
    layers above this one by its F, as PureKV does with its scores; only layers 0 to clie are then probed; empty: off.

    Ours: one choice a KV head; a piece of frames is scored whole before any token goes, where the paper evicts one token for
    every new one; rows of questions and answers are not counted, because they leave no trace in the memory.
    """

    recent: float = 0.5
    clie: str = ""

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    state_fields = ("_scores", "_cross")

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= 1:
            raise ValueError("recent lies in 0..1")
        layer_number(self.clie)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._cross = booster(self.clie, shape.layers)
        self._scores = {layer: SeqScores() for layer in self.needs.probe_layers}

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=self._cross.probe_layers if self._cross else tuple(range(self.shape.layers)))

    @property
    def room(self) -> int:
        """A quarter of |M|: as much is evicted as is asked, and a larger piece would be scored by its own rows most."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        for layer, query in appended.queries.items():
            key, seq = cache.key(layer), cache.seq(layer)
            mass = np.zeros(seq.shape)
            for start in range(0, len(appended.seq), ROWS):
                rows = slice(start, start + ROWS)
                mass += kernels.attention_mass(query[:, rows], appended.seq[rows], key, seq, scale=cache.key_scale(layer))
            self._scores[layer].add(seq, mass, int(cache.capacities[layer]))

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        if self._cross is not None:
            self._cross.take(cache, {layer: self._accumulated(cache, layer) for layer in self._cross.probe_layers})

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, prefix = cache.seq(layer), self.protected(cache, layer)
        count = tokens_of(self.recent, target)
        recent = newest(seq, ~prefix, count)
        score = self._cross.importance(cache, layer) if self._cross else self._accumulated(cache, layer)
        return prefix | recent | kernels.top_k(score, seq, ~(prefix | recent), target - count)

    def _accumulated(self, cache: KVCache, layer: int) -> Float32:
        """F of each row, ``[kv_heads, n]``."""
        return self._scores[layer].get(cache.seq(layer)).astype(np.float32)
