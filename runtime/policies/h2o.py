"""The policy H2O (arXiv 2306.14048) keeps the newest tokens and the tokens with the most accumulated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgevlm.runtime.policies.attention import SeqScores
from edgevlm.runtime.policies.base import Appended, EvictsOnDemand, Needs, StreamShape, setting, tokens_of
from edgevlm.runtime.policies.layer import Layer


@dataclass
class H2O(EvictsOnDemand):
    """Keep the newest tokens, and the tokens that have received the most attention from all later rows.

    A token's attention is the sum of softmax(q_i K^T / sqrt(D))_t over all appended rows i and the query heads of a KV head.

    Ours: each KV head chooses its own tokens. All frames of an append are scored before any token is evicted. The paper evicts
    one token for each new token. Questions and answers never change the memory, so their attention is not counted.
    """

    recent: float = setting(
        0.5, "fraction of |C| reserved for the newest tokens; the rest are heavy hitters", at_least=0, at_most=1
    )

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    state_fields = ("_scores",)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._scores = {layer: SeqScores() for layer in range(shape.layers)}

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=tuple(range(self.shape.layers)))

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        for layer in layers:
            mass, known = layer.attention_of(appended.queries[layer.index], seq=appended.seq), self._scores[layer.index]
            known.replace(
                layer.seq, known.get(layer.seq) + mass, self.shape.prefix + max(self.budget, self.shape.tokens_per_frame)
            )

    def compress(self, layer: Layer) -> None:
        count = tokens_of(self.recent, layer.target)
        newest, score = layer.newest(count), self._scores[layer.index].get(layer.seq)
        layer.keep(newest | layer.top(score, layer.target - count, layer.free & ~newest))
