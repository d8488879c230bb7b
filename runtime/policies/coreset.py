"""The policy coreset follows CoRDS (arXiv 2605.14310): each evicted token has a kept token with a similar key and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import setting
from edgevlm.runtime.policies.last_seen import OneChoice
from edgevlm.runtime.policies.layer import Float32, Int64, Layer, normalized


@dataclass
class Coreset(OneChoice):
    """Keep the newest token, then repeatedly take the token that differs most from the tokens taken.

    The next token is the token t with the highest score, 1 - max_s x_t . x_s + diversity log(.01 + r_t), where s runs over the
    tokens taken so far. The vector x_t concatenates token t's un-rotated key of the first layer and its key and value of the
    deepest layer, for all KV heads. Each key and value is scaled to length 1, and then the whole vector x_t is scaled to length
    1. The number r_t is the squared length of the part of x_t orthogonal to the first ``directions`` tokens taken. The
    similarity term is the one that greedy k-centre selection uses. The term with r_t favours a large log-determinant. After
    ``steps`` tokens have been taken, the rest are taken at once, by their last scores. All layers and heads keep the same
    tokens; the newest token wins ties.

    Ours: the code of CoRDS is not published, so the weights, the choice of layers and the limit on directions are ours. CoRDS
    always keeps recent tokens. In edgevlm, the newest frame is appended after the choice, so questions see it whole.
    """

    diversity: float = setting(0.3, "weight of the log-determinant term; 0 disables it", at_least=0)
    directions: int = setting(64, "number of selected tokens that the log-determinant term uses", at_least=0)
    steps: int = setting(1024, "number of tokens selected one at a time; the rest are selected in one step", at_least=1)
    target: float = setting(0.75, "fraction of |M| that a compression keeps", above=0, at_most=1)

    name: ClassVar[str] = "coreset"
    paper: ClassVar[str] = "after CoRDS, arXiv 2605.14310"

    def worth(self, layers: Sequence[Layer]) -> Float32:
        layer = layers[-1]
        seq = layer.seq
        rows = np.flatnonzero(layer.kind[0] == Kind.VISION)
        rows = rows[np.argsort(-seq[0, rows])]
        count = min(layer.target, len(rows))
        taken = kernels.coreset(
            joint_rows(layers[0], layer, rows), count, diversity=self.diversity, directions=self.directions, steps=self.steps
        )
        score = np.full(seq.shape, -len(rows), np.float32)
        score[:, rows[taken]] = -np.arange(count, dtype=np.float32)
        return score


def joint_rows(first: Layer, deepest: Layer, rows: Int64) -> Float32:
    """Return the vectors x_t of tokens that the deepest layer holds, ``[n, kv_heads * 3 * head_dim]``.

    ``rows``: the tokens' rows in the deepest layer, ``[n]``. A key of the first layer depends only on the token itself. If the
    first layer has evicted a token, the key is zero.
    """
    at = kernels.index_of(np.ascontiguousarray(deepest.seq[:, rows]), first.seq)[..., None]
    own = np.where(at < 0, np.float32(0), np.take_along_axis(first.keys, np.maximum(at, 0), 1))
    parts = normalized(np.stack([own, deepest.keys[:, rows], deepest.values[:, rows]], 2))  # [kv_heads, n, 3, head_dim]
    return np.ascontiguousarray(normalized(parts.transpose(1, 0, 2, 3).reshape(len(rows), -1)))
