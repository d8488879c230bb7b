"""Keep the state of policies that rank tokens by attention: recent queries, and a score for each token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import Appended, Float32
from edgevlm.runtime.policies.layer import Layer
from edgevlm.runtime.retrieval.working_set import rotate
from edgevlm.runtime.stateful import State, Stateful

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class QueryWindow(Stateful):
    """The queries of the newest vision rows, up to ``rows`` of them for each probe layer.

    Queries are stored as ``[heads, rows, head_dim]``, rotated to the positions that their rows had when appended. Re-indexing
    may change these positions, so :meth:`at` rotates the queries again.
    """

    state_fields = ("_seq", "_position", "_queries")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._seq = np.zeros(0, np.int64)  # [w], ascending
        self._position = np.zeros((0, 1), np.int32)
        self._queries: dict[int, Float32] = {}  # layer -> [heads, w, head_dim]

    def restore(self, state: State) -> None:
        super().restore(state)
        rows, queries = self._seq.shape, self._queries.values()
        if (
            self._position.shape[:1] != rows
            or self._position.ndim != 2
            or any(each.ndim != 3 or each.shape[1:2] != rows or not np.isfinite(each).all() for each in queries)
        ):
            shapes = [list(each.shape) for each in queries]
            raise ValueError(f"invalid queries {shapes} with positions {list(self._position.shape)} for {list(rows)} rows")

    def add(self, appended: Appended) -> None:
        """Add the queries of the rows just appended, and keep only the newest ``rows`` queries."""
        self._seq = np.concatenate([self._seq, appended.seq])[-self.rows :]
        position = self._position if len(self._position) else appended.position[:0]
        self._position = np.concatenate([position, appended.position])[-self.rows :]
        for layer, new in appended.queries.items():
            old = self._queries.get(layer, new[:, :0])
            self._queries[layer] = np.concatenate([old, new], 1)[:, -self.rows :]

    def at(self, layer: Layer) -> tuple[Float32, Int64]:
        """Return a layer's queries, rotated to their rows' current positions, and the ``seq`` of each query's row.

        A row's queries are left out if any head has evicted the row or a newer one. The queries have the shape
        ``[heads, w, head_dim]``, and ``seq`` has the shape ``[w]``. Raises ValueError if the layer has no queries.
        """
        if layer.index not in self._queries:
            what = f"the window has no queries for layer {layer.index}"
            raise ValueError(f"{what}; add it to needs.probe_layers, and call add(appended) in after_append")
        cache, mine = layer.cache, (layer.kind == Kind.VISION) | (layer.kind == Kind.SUMMARY)
        count = min(len(self._seq), int(mine[0].sum()))
        at = np.nonzero(layer.newest(count, mine))[1].reshape(-1, count)  # [kv_heads, count], in no particular order
        seq = np.take_along_axis(layer.seq, at, 1)
        order = np.argsort(seq, 1)
        at, seq = np.take_along_axis(at, order, 1), np.take_along_axis(seq, order, 1)
        gaps = np.flatnonzero((seq != self._seq[len(self._seq) - count :]).any(0))
        count -= int(gaps[-1]) + 1 if len(gaps) else 0
        at, start = at[:, at.shape[1] - count :], len(self._seq) - count
        now = np.take_along_axis(cache.position(layer.index), at[..., None], 1)  # [kv_heads, w, axes]
        queries, by = self._queries[layer.index][:, start:], now - self._position[start:]
        if by.any():
            by = np.repeat(by, len(queries) // len(by), 0)
            queries = rotate(queries, by, cache.frequencies(layer.index), cache.pair_axis)
        return queries, self._seq[start:]


class SeqScores(Stateful):
    """A table of float64 scores for up to ``capacity`` tokens in each head, looked up by the token's ``seq``."""

    state_fields = ("_seq", "_score", "_count")

    def __init__(self) -> None:
        self._seq, self._score, self._count = np.zeros((0, 0), np.int64), np.zeros((0, 0)), 0

    def restore(self, state: State) -> None:
        super().restore(state)
        if (
            self._score.shape != self._seq.shape
            or not 0 <= self._count <= self._seq.shape[1]
            or not np.isfinite(self._score).all()
        ):
            raise ValueError(
                f"invalid scores {list(self._score.shape)} for tokens {list(self._seq.shape)}, count {self._count}"
            )

    def get(self, seq: Int64) -> Float64:
        """Return each token's score, or 0 for a token without a score. ``seq``: ``[heads, n]``."""
        out = np.zeros(seq.shape)
        if self._count:
            place = kernels.index_of(seq, self._seq[:, : self._count])
            np.copyto(out, np.take_along_axis(self._score, place, 1), where=place >= 0)
        return out

    def replace(self, seq: Int64, score: Float64, capacity: int) -> None:
        """Replace the whole table. ``seq`` and ``score`` are ``[heads, n]``, in any order."""
        if not self._seq.size:
            self._seq, self._score = np.zeros((len(seq), capacity), np.int64), np.zeros((len(seq), capacity))
        self._count = seq.shape[1]
        self._seq[:, : self._count] = seq
        self._score[:, : self._count] = score
