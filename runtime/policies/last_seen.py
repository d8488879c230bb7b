"""Our policy last-seen keeps the last of several similar tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.attention import SeqScores
from edgevlm.runtime.policies.base import SteadyTarget, StreamShape, setting
from edgevlm.runtime.policies.layer import Bool, Float32, Int64, Layer


class OneChoice(SteadyTarget):
    """A policy that scores the tokens of only one layer. All layers and heads keep the tokens with the highest scores."""

    ranks: ClassVar[int] = -1  # the layer whose tokens are scored: the deepest

    def worth(self, layers: Sequence[Layer]) -> Float32:
        """Return a score for each row of the scored layer, ``[kv_heads, n]``. The rows with the highest scores stay."""
        raise NotImplementedError

    def prepare(self, layers: Sequence[Layer]) -> tuple[Float32, Int64, dict[int, Bool]]:
        """Return the scores and ``seq`` of the scored layer's rows, ``[kv_heads, n]``, and an empty dict in which
        :meth:`compress` stores masks.
        """
        return self.worth(layers), layers[self.ranks].seq, {}

    def compress(self, layer: Layer) -> None:
        score, ranked, shared = layer.prepared
        vision = layer.kind == Kind.VISION
        if not np.array_equal(layer.seq, ranked):  # evict first the rows that the scored layer no longer holds
            at = kernels.index_of(layer.seq, ranked)
            known = np.take_along_axis(score, np.maximum(at, 0), 1)
            layer.keep(layer.top(np.where(at < 0, np.float32(-np.inf), known), layer.target, vision))
            return
        if layer.target not in shared:
            shared[layer.target] = layer.top(score, layer.target, vision)
        layer.keep(shared[layer.target])


@dataclass
class LastSeen(OneChoice):
    """Keep the tokens that are least similar to any later token, measured by the deepest layer's keys.

    A token's likeness is max cos(k_t, k_s) over the later tokens s, averaged over heads; -1 for the newest token. Keys are
    compared un-rotated. Later tokens count even after they are evicted. The tokens with the lowest likeness stay in all layers.

    Ours: there is no paper.
    """

    target: float = setting(0.75, "fraction of |M| that a compression keeps", above=0, at_most=1)

    name: ClassVar[str] = "last-seen"
    paper: ClassVar[str] = "ours, docs/internals/last-seen.md"
    state_fields = ("_known", "_since")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._known = SeqScores()
        self._since = 0  # seq of the first token that has not been compared yet

    def worth(self, layers: Sequence[Layer]) -> Float32:
        """Return each token's negative likeness, updated with the tokens appended since the last compression."""
        layer = layers[-1]
        seq = layer.seq
        newer = kernels.newer_similarity(layer.cache, layer.index, layer.kind == Kind.VISION, self._since)
        known = np.maximum(self._known.get(seq), 1 + newer)
        self._known.replace(seq, known, self.shape.prefix + max(self.budget, self.shape.tokens_per_frame))
        self._since = int(seq.max()) + 1
        likeness = (known - 1).astype(np.float32)
        return -np.broadcast_to(likeness.mean(0, dtype=np.float64).astype(np.float32), likeness.shape)
