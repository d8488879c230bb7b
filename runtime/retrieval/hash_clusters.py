"""ReSV's hash clusters (V-Rex, sec. IV-B and C): arrays of a fixed size, and the kernels that work on them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native
from edgevlm.runtime.stateful import State, Stateful

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

BITS = 32  # hyperplanes of a KV head, N_hp
MIN_SLOTS = 4
SEED = 20251212  # of the hyperplanes, the same in every stream
SPREAD = 32  # their standard deviation: coarse numbers point as random a way as fine ones, and take a quarter of the index


class HashClusters(Stateful):
    """Clusters of the keys of every layer and KV head, in ``slots`` slots each, one of them free between calls.

    A cluster is open while tokens may join it, then sealed; open ones take half of the slots at most. key: mean of its tokens,
    ``[layers, kv_heads, slots, head_dim]``. bits: uint32, bit p is set if the mean's dot with hyperplane p is above 0. count:
    tokens; 0 is a free slot. position: the mean of its tokens', ``[..., axes]``. planes: int8 ``[kv_heads, head_dim, 32]``,
    normal numbers rounded.
    """

    state_fields = ("key", "bits", "count", "open", "position", "planes")

    def __init__(self, layers: int, kv_heads: int, head_dim: int, axes: int, slots: int) -> None:
        self.slots = slots
        shape = (layers, kv_heads, slots)
        self.key = np.zeros((*shape, head_dim), np.float32)
        self.bits = np.zeros(shape, np.uint32)
        self.count = np.zeros(shape, np.int32)
        self.open = np.zeros(shape, np.bool_)
        self.position = np.zeros((*shape, axes), np.float32)
        drawn = np.random.default_rng(SEED).standard_normal((kv_heads, head_dim, BITS))
        self.planes = np.clip(np.rint(SPREAD * drawn), -127, 127).astype(np.int8)

    def restore(self, state: State) -> None:
        super().restore(state)
        if (self.count < 0).any() or not (np.isfinite(self.key).all() and np.isfinite(self.position).all()):
            raise ValueError("clusters of less than no tokens, or that are nowhere")

    @staticmethod
    def slot_bytes(head_dim: int, axes: int) -> int:
        """Of one cluster."""
        return 4 * head_dim + 4 + 4 + 1 + 4 * axes

    def join(self, layer: int, keys: Float32, positions: Float32, distance: int) -> tuple[Int32, Int32, int, int]:
        """Let tokens join the nearest open cluster within ``distance`` bits, one by one, or found one.

        keys: rotated, ``[kv_heads, n, head_dim]``; positions: ``[kv_heads, n, axes]``. Of equally near clusters the lowest slot
        wins; a new one takes the lowest free slot. Returns each token's slot ``[kv_heads, n]``; the moves and merges of sealed
        clusters, as :meth:`seal`; and the tokens that joined beyond the distance, because half of the slots were open.
        """
        return _native.hash_join(keys, positions, distance, *self._of(layer))

    def seal(self, layer: int, keys: Float32, positions: Float32, slot: Int32, leaving: Bool) -> tuple[Int32, int]:
        """Seal the leaving rows of each open cluster as a cluster of its own; the rest has a new mean.

        All arrays ``[kv_heads, n, ...]``; slot: each row's cluster, -1 for none. Returns where sealed clusters are now and how
        many joined another for want of a slot. home: ``[kv_heads, 2 * slots]``: ``home[h, s]`` is the new slot of the cluster
        sealed in slot s before, ``home[h, slots + s]`` of the part sealed of the open cluster in slot s; -1 if there was none.
        """
        return _native.hash_seal(keys, positions, slot, leaving, *self._of(layer))

    def choose(self, layer: int, query: Float32, fraction: float) -> Float32:
        """WiCSum (eqs. 1 to 3): the clusters that a call's rows choose, for each KV head.

        query: rotated, ``[heads, S, head_dim]``. Returns float32 ``[kv_heads, slots]``: the highest score of a cluster in the
        rows that choose it, -1 for the others. Scores are the row's softmax of ``q k / sqrt(head_dim)`` over all clusters; a
        row takes them in descending order until score times count adds up to more than ``fraction`` of the sum over all.
        """
        return _native.wicsum(query, self.key[layer], self.count[layer], fraction)

    @property
    def sealed(self) -> Bool:
        """``[layers, kv_heads, slots]``."""
        return (self.count > 0) & ~self.open

    def rehash(self) -> None:
        """Compute bits again, after keys have been turned."""
        for layer, keys in enumerate(self.key):
            self.bits[layer] = _native.hash_bits(keys, self.planes.astype(np.float32))

    def _of(self, layer: int) -> tuple[NDArray, ...]:
        parts = (self.key, self.bits, self.count, self.open, self.position)
        return (*(part[layer] for part in parts), self.planes.astype(np.float32))


class RowClusters(Stateful):
    """The cluster of each row of the window: up to ``rows`` rows by ``seq``, with a slot in every layer and KV head."""

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
        self._held = len(at)
        self._seq[: self._held], self._slot[..., : self._held] = self._seq[at], self._slot[..., at]

    def add(self, seq: Int64, slot: Int32) -> None:
        """Rows newer than all others: rising, ``[n]``, and ``[layers, kv_heads, n]``."""
        new = slice(self._held, self._held + len(seq))
        self._seq[new], self._slot[..., new], self._held = seq, slot, new.stop

    def of(self, layer: int, seq: Int64) -> Int32:
        """The slots of rows ``[kv_heads, n]`` in any order, -1 of those that are not known."""
        if not self._held:
            return np.full(seq.shape, -1, np.int32)
        at = np.minimum(np.searchsorted(self.seq, seq), self._held - 1)
        slot = np.take_along_axis(self._slot[layer], at, 1)
        return np.where(self._seq[at] == seq, slot, np.int32(-1))
