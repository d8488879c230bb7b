"""Our policy first-seen keeps the first of several similar tokens, with the tokens around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.attention import SeqScores
from edgevlm.runtime.policies.base import StreamShape, setting
from edgevlm.runtime.policies.last_seen import OneChoice
from edgevlm.runtime.policies.layer import Float32, Layer, normalized

BLOCK = 256  # the number of tokens compared at a time


@dataclass
class FirstSeen(OneChoice):
    """Keep the tokens whose neighbourhood was least similar to earlier tokens, measured by the first layer's values.

    A token's novelty is 1 - max cos(v_t, v_s) over the held tokens s before t, where v_t concatenates token t's values of all
    heads. A score is the mean novelty of a token and ``reach`` new neighbours on each side, computed once, at the token's first
    compression. The tokens with the highest scores stay, the same in all layers; newer tokens win ties.

    Ours: there is no paper. The first layer's values depend only on the token itself, not on earlier tokens.
    """

    reach: int = setting(2, "number of neighbours on each side that a token's score is averaged over", at_least=0)
    target: float = setting(0.9, "fraction of |M| that a compression keeps", above=0, at_most=1)

    name: ClassVar[str] = "first-seen"
    paper: ClassVar[str] = "ours, docs/internals/policies.md"
    state_fields = ("_known", "_since")
    ranks = 0

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._known = SeqScores()
        self._since = 0  # seq of the first token without a score

    def worth(self, layers: Sequence[Layer]) -> Float32:
        layer = layers[0]
        seq = layer.seq[:1]
        rows = np.flatnonzero(layer.kind[0] == Kind.VISION)
        rows = rows[np.argsort(seq[0, rows])]
        new = int(np.searchsorted(seq[0, rows], self._since))
        score = self._known.get(seq)
        score[0, rows[new:]] = _mean_around(_novelty(layer.values[:, rows], new), self.reach)
        self._known.replace(seq, score, self.shape.prefix + max(self.budget, self.shape.tokens_per_frame))
        self._since = int(seq.max()) + 1
        return np.broadcast_to(score.astype(np.float32), layer.seq.shape)


def _novelty(values: Float32, new: int) -> Float32:
    """Return the novelty of token ``new`` and all later tokens. ``values``: ``[kv_heads, n, head_dim]``, oldest first."""
    joined = values.swapaxes(0, 1).reshape(values.shape[1], -1)
    rows = normalized(joined)
    most = [np.zeros(0, np.float32)]
    for start in range(new, len(rows), BLOCK):
        some = rows[start : start + BLOCK]
        cosine = some @ rows[: start + len(some)].T
        cosine[~np.tri(len(some), start + len(some), start - 1, np.bool_)] = -1  # ignores the token itself and later tokens
        most.append(cosine.max(1))
    return 1 - np.concatenate(most)


def _mean_around(x: Float32, reach: int) -> Float32:
    sums, at = np.concatenate([[0.0], np.cumsum(x, dtype=np.float64)]), np.arange(len(x))
    first, end = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(x))
    mean: Float32 = ((sums[end] - sums[first]) / (end - first)).astype(np.float32)
    return mean
