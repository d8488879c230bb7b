"""How well a low layer's attention ranks the tokens of the layers above it (PureKV, eqs. 5 to 7, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CANDIDATES = 6  # lowest layers that are tried as CLIE layer


def ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Ranks 1..n of ``[n]`` values, equal ones sharing the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def spearman(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Spearman's rank correlation of two lists ``[n]``: Pearson's of their ranks; 0 where one of them is constant."""
    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def agreement(mass: Sequence[NDArray[np.floating]], norms: Sequence[NDArray[np.floating]]) -> list[list[float | None]]:
    """Per candidate c and layer l > c the correlation of ``S^c ||V^l||`` (eq. 4) with ``S^l ||V^l||`` (eq. 3), over KV heads.

    mass: per layer S of the n tokens before the newest w, ``[kv_heads, n]``; norms: ||V||, of those and what follows. Layers up
    to the candidate have None.
    """
    layers, (heads, n) = len(mass), mass[0].shape
    norms = [of_layer[:, :n] for of_layer in norms]
    return [
        [
            float(np.mean([spearman(mass[c][h] * norms[layer][h], mass[layer][h] * norms[layer][h]) for h in range(heads)]))
            if layer > c
            else None
            for layer in range(layers)
        ]
        for c in range(max(1, min(CANDIDATES, layers - 1)))
    ]


def best_candidate(table: Sequence[Sequence[float | None]]) -> int:
    """The candidate that agrees best with the layers above all candidates; the lower one of equals."""
    return int(np.argmax([np.mean([row[layer] or 0.0 for layer in range(len(table), len(row))] or [0.0]) for row in table]))
