"""Scores that outlive a compression: joined to the cache by ``seq``, in memory fixed at start."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.stateful import Stateful

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class SeqScores(Stateful):
    """One float64 score a token and head, for up to ``capacity`` tokens a head, each found by its ``seq``.

    ``seq``, ``score``: ``[heads, capacity]``, allocated when the first scores come; the first ``count`` of each head are valid.
    """

    state_fields = ("_seq", "_score", "_count")

    def __init__(self) -> None:
        self._seq, self._score, self._count = np.zeros((0, 0), np.int64), np.zeros((0, 0)), 0

    def get(self, seq: Int64) -> Float64:
        """The score of each token of ``seq`` ``[heads, n]``, in any order; 0 for one that has none."""
        out = np.zeros(seq.shape)
        if self._count == 0:
            return out
        place = kernels.index_of(seq, self._seq[:, : self._count])
        np.copyto(out, np.take_along_axis(self._score, place, 1), where=place >= 0)
        return out

    def replace(self, seq: Int64, score: Float64, capacity: int) -> None:
        """Hold just these tokens, ``[heads, n]`` in any order: what is not among them is forgotten."""
        if not self._seq.size:
            self._seq, self._score = np.zeros((len(seq), capacity), np.int64), np.zeros((len(seq), capacity))
        self._count = seq.shape[1]
        self._seq[:, : self._count] = seq
        self._score[:, : self._count] = score

    def add(self, seq: Int64, score: NDArray[np.floating], capacity: int) -> None:
        """Add to the scores of ``seq`` ``[heads, n]``, all the tokens there now are."""
        self.replace(seq, self.get(seq) + score, capacity)
