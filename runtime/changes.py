"""Append only what changed: which tokens of a frame differ from those that were last appended at their patches."""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.settings import AppendChanged
from edgevlm.runtime.stateful import Stateful

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]


class References(Stateful):
    """Of each patch, the feature of the token last appended there, normalised.

    A frame is compared with what was *appended*, not with the frame before it, so slow drift cannot hide.
    """

    state_fields = ("_features", "_age", "seq")

    def __init__(self, settings: AppendChanged, tokens: int, width: int) -> None:
        self.settings = settings
        self._features = np.zeros((tokens, width), np.float32)
        self._age = np.zeros(tokens, np.int32)  # frames since a patch was appended
        self.seq = np.full(tokens, -1, np.int64)  # the token appended last at each patch

    def changed(self, unit: Float32) -> Bool:
        """Which tokens of a frame to append, ``[tokens]``, by its :func:`unit_features`. The first frame's are all."""
        changed: Bool = np.einsum("pw,pw->p", unit, self._features) < self.settings.tau
        if self.settings.refresh:
            changed |= self._age + 1 >= self.settings.refresh
        return changed

    def appended(self, unit: Float32, changed: Bool, seq: NDArray[np.int64]) -> None:
        """The ``changed`` tokens of a frame are in the memory now, as ``seq``."""
        self.seq[changed] = seq
        self._features[changed] = unit[changed]
        self._age += 1
        self._age[changed] = 0

    def copy(self) -> References:
        """Which goes on by itself."""
        other = copy.copy(self)
        other._features, other._age, other.seq = self._features.copy(), self._age.copy(), self.seq.copy()
        return other


def unit_features(features: Float32) -> Float32:
    """Features ``[..., width]`` of length 1; zeros stay."""
    norms = np.sqrt(np.einsum("...w,...w->...", features, features))[..., None]
    unit: Float32 = features / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit
