"""Scores that outlive a compression: joined to the cache by ``seq``, in memory fixed at start."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class SeqScores:
    """One float64 score a token and head, for up to ``capacity`` tokens a head, each found by its ``seq``.

    ``seq``, ``score``: ``[heads, capacity]``, the first ``count`` of each head valid, by rising seq.
    """

    def __init__(self, heads: int, capacity: int) -> None:
        self._seq = np.zeros((heads, capacity), np.int64)
        self._score = np.zeros((heads, capacity), np.float64)
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self._seq.nbytes + self._score.nbytes

    def get(self, seq: Int64) -> Float64:
        """The score of each token of ``seq`` ``[heads, n]``, in any order; 0 for one that has none."""
        out = np.zeros(seq.shape)
        if self._count == 0:
            return out
        for head, known in enumerate(self._seq[:, : self._count]):
            place = np.minimum(np.searchsorted(known, seq[head]), self._count - 1)
            out[head] = np.where(known[place] == seq[head], self._score[head, place], 0.0)
        return out

    def replace(self, seq: Int64, score: Float64) -> None:
        """Hold just these tokens, ``[heads, n]`` in any order: what is not among them is forgotten."""
        order = np.argsort(seq, axis=1)
        self._count = seq.shape[1]
        self._seq[:, : self._count] = np.take_along_axis(seq, order, 1)
        self._score[:, : self._count] = np.take_along_axis(score, order, 1)

    def add(self, seq: Int64, score: NDArray[np.floating]) -> None:
        """Add to the scores of ``seq`` ``[heads, n]``, all the tokens there now are."""
        self.replace(seq, self.get(seq) + score)
