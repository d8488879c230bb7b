"""Value norms: how much they vary in each layer, and where VaN's windows change (InfiniPot-V, Alg. 2, lines 16 to 21)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgevlm.runtime.policies.infinipot_v import WINDOWS


def thresholds(cv: Sequence[float]) -> tuple[float, float, float]:
    """tau1 < tau2 < tau3 that split the layers' CV at its quartiles: the least varying quarter gets window 7, the next 5, 3, 1.

    tau_k lies half way between the two neighbours in sorted order around rank ceil(k L / 4), so that no layer's own CV is on a
    border; where CV rises with depth the windows are those of the preset. Of fewer than 4 layers, or equal ones, some windows
    are left out.
    """
    ordered = np.sort(np.asarray(cv, np.float64))
    borders: list[float] = []
    for quarter in range(1, len(WINDOWS)):
        rank = min(math.ceil(quarter * len(ordered) / len(WINDOWS)), len(ordered) - 1)
        middle = float(ordered[max(rank - 1, 0)] + ordered[rank]) / 2
        borders.append(max(middle, math.nextafter(borders[-1], math.inf)) if borders else middle)
    return borders[0], borders[1], borders[2]
