"""Which cluster each row of the window belongs to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.stateful import Stateful

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Members(Stateful):
    """Up to ``rows`` rows by ``seq``, the same in every layer and head, and of each its slot in every layer and KV head."""

    state_fields = ("_seq", "_slot", "_held")

    def __init__(self, layers: int, kv_heads: int, rows: int) -> None:
        self._seq = np.zeros(rows, np.int64)  # rising
        self._slot = np.zeros((layers, kv_heads, rows), np.int32)
        self._held = 0

    @staticmethod
    def row_bytes(layers: int, kv_heads: int) -> int:
        return 8 + 4 * layers * kv_heads

    @property
    def seq(self) -> Int64:
        """Rising, ``[n]``: a view."""
        return self._seq[: self._held]

    def keep(self, seq: Int64) -> None:
        """Forget all but these; rising, ``[n]``, each of them known."""
        at = np.searchsorted(self.seq, seq)
        self._seq[: len(at)] = self._seq[at]
        self._slot[..., : len(at)] = self._slot[..., at]
        self._held = len(at)

    def add(self, seq: Int64, slot: Int32) -> None:
        """Rows newer than all others: rising, ``[n]``, and ``[layers, kv_heads, n]``."""
        end = self._held + len(seq)
        self._seq[self._held : end] = seq
        self._slot[..., self._held : end] = slot
        self._held = end

    def of(self, layer: int, seq: Int64) -> Int32:
        """The slots of rows ``[kv_heads, n]`` in any order, -1 of those that are not known."""
        if not self._held:
            return np.full(seq.shape, -1, np.int32)
        at = np.minimum(np.searchsorted(self.seq, seq), self._held - 1)
        slot = np.take_along_axis(self._slot[layer], at, 1)
        return np.where(self._seq[at] == seq, slot, np.int32(-1))
