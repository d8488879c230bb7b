"""Keep tokens that represent all others: `edgevlm run --policy ./examples/coreset_policy.py:Centres`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgevlm.extend import Layer, Policy, setting


@dataclass
class Centres(Policy):
    """A policy that repeatedly chooses the token least similar to those already chosen, by the deepest layer's keys."""

    centres: int = setting(64, "tokens that are chosen one by one", at_least=1)

    def prepare(self, layers: Sequence[Layer]) -> np.ndarray:
        """Rank the rows once, [n], so that all layers and heads keep the same tokens."""
        keys = layers[-1].keys.transpose(1, 0, 2)
        keys = keys.reshape(len(keys), -1)  # all heads' keys, [n, kv_heads * head_dim]
        keys /= np.linalg.norm(keys, axis=1, keepdims=True) + 1e-9
        rank, nearest = np.zeros(len(keys), np.float32), np.where(layers[-1].free[0], -1.0, np.inf)
        at = int(layers[-1].seq[0].argmax())
        for chosen in range(min(self.centres, layers[-1].target)):
            rank[at], nearest = self.centres - chosen, np.maximum(nearest, keys @ keys[at])
            at = int(np.where(rank > 0, np.inf, nearest).argmin())
        return np.where(rank > 0, rank, -nearest)

    def score(self, layer: Layer) -> np.ndarray:
        return np.broadcast_to(layer.prepared, layer.seq.shape)
