"""The queries of the newest rows, kept for a policy that scores by them later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Appended, newest
from edgevlm.runtime.stateful import Stateful

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


class QueryWindow(Stateful):
    """The last ``rows`` vision rows' queries in each probe layer: ``[heads, rows, head_dim]`` each, and no more than that.

    They are kept as they came, rotated, with ``seq`` and ``position``. When a re-indexing has moved the keys of those rows
    since, :meth:`at` rotates them along, so that a query meets every key at the distance the cache now has;
    with 3 axes each rotary pair by its own axis.
    """

    state_fields = ("_seq", "_position", "_queries")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._seq = np.zeros(0, np.int64)  # [w], rising
        self._position = np.zeros((0, 1), np.int32)  # [w, axes]
        self._queries: dict[int, Float32] = {}  # layer -> [heads, w, head_dim]

    def add(self, appended: Appended) -> None:
        """Take the newest of the rows just appended; older ones leave."""
        self._seq = np.concatenate([self._seq, appended.seq])[-self.rows :]
        position = self._position if len(self._position) else appended.position[:0]
        self._position = np.concatenate([position, appended.position])[-self.rows :]
        for layer, new in appended.queries.items():
            old = self._queries.get(layer, new[:, :0])
            self._queries[layer] = np.concatenate([old, new], 1)[:, -self.rows :]

    def at(self, cache: KVCache, layer: int) -> tuple[Float32, Int64]:
        """Queries ``[heads, w, head_dim]`` rotated to where each KV head has their rows now, and their seq ``[w]``.

        w: as many of the newest rows as every head of the layer still holds without a gap.
        """
        mine = np.isin(cache.kind(layer), (Kind.VISION, Kind.SUMMARY))
        count = min(len(self._seq), int(mine[0].sum()))
        at = np.nonzero(newest(cache.seq(layer), mine, count))[1].reshape(-1, count)  # [kv_heads, count], in no order
        seq = np.take_along_axis(cache.seq(layer), at, 1)
        order = np.argsort(seq, 1)
        at, seq = np.take_along_axis(at, order, 1), np.take_along_axis(seq, order, 1)
        gaps = np.flatnonzero((seq != self._seq[len(self._seq) - count :]).any(0))
        count -= int(gaps[-1]) + 1 if len(gaps) else 0
        at, start = at[:, at.shape[1] - count :], len(self._seq) - count
        now = np.take_along_axis(cache.position(layer), at[..., None], 1)  # [kv_heads, w, axes]
        by = now - self._position[start:]
        return _turn(self._queries[layer][:, start:], by, cache.inv_freq, cache.pair_axis), self._seq[start:]


def _turn(query: Float32, by: NDArray[np.int32], inv_freq: NDArray[np.float64], pair_axis: NDArray[np.uint8] | None) -> Float32:
    """Rotate ``query`` ``[heads, w, D]`` by positions ``[kv_heads, w, axes]``, one for all heads of a group; as is by 0."""
    if not by.any():
        return query
    steps = by if pair_axis is None else by[..., pair_axis]  # of each rotary pair, [kv_heads, w, 1 or D / 2]
    angle = np.repeat(steps * inv_freq, len(query) // len(by), 0)  # [heads, w, D / 2], float64
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = np.split(query, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
