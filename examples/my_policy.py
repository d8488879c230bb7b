"""A policy of your own: `edgevlm run --policy ./examples/my_policy.py:SmallKeys`, or `...:SmallKeys:newest=0.5`.

A package offers it by name instead, with an entry point of the group "edgevlm.policies" in its pyproject.toml.
"""

from dataclasses import dataclass

import numpy as np

from edgevlm.runtime.policies import Policy, setting


@dataclass
class SmallKeys(Policy):
    """Keep tokens whose keys are short, and the newest frames."""

    newest: float = setting(0.25, "fraction of the tokens held that is kept for being new", at_least=0, at_most=1)

    def score(self, layer):
        """Higher stays, [kv_heads, n]; prefix and text are kept without being asked for."""
        score = -np.linalg.norm(layer.keys, axis=-1)
        score[layer.seq >= np.quantile(layer.seq, 1 - self.newest)] = np.inf
        return score
