"""SnapKV: the newest rows observe which past tokens matter. arXiv 2404.14469."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.base import Appended, Bool, Guide, Needs, Policy, StreamShape, newest, tokens_of
from edgevlm.runtime.policies.cross_layer import booster, layer_number
from edgevlm.runtime.policies.queries import QueryWindow

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Float32 = NDArray[np.float32]
Pool = Literal["max", "avg"]


@dataclass
class SnapKV(Policy):
    """Keep the newest rows, the observers, and the past tokens that they attend to most.

    u_t = sum over the observers i of softmax(q_i K^T / sqrt(D))_t, summed over the query heads of a KV head, pooled over the
    neighbours along ``seq``; each KV head keeps its own top of u (InfiniPot-V, App. D.1, eq. 1, in its continual setting).

    window: how many of the newest rows observe; they are kept. kernel: tokens that the pool spans, odd. pool: ``max`` or
    ``avg`` over the kernel, absent neighbours left out. target: |C| / |M|. clie: rank by PureKV's importance in the place of
    u, from the attention of layers 0 to this one; empty: off.

    Ours: one choice a KV head, where the authors' program repeats keys and chooses per query head. Scores are summed over the
    group before pooling. The prefix and the observers are not pooled with. Where |C| is below the window, the newest |C| stay.
    """

    window: int = 32
    kernel: int = 7
    pool: Pool = "max"
    target: float = 0.75
    clie: str = ""

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    state_fields = ("_queries", "_cross")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0 or not 0 < self.target <= 1:
            raise ValueError("window is 1 or more, kernel odd, and target lies in (0, 1]")
        layer_number(self.clie)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._queries = QueryWindow(self.window)
        self._cross = booster(self.clie, shape.layers, self.window)

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=self._cross.probe_layers if self._cross else tuple(range(self.shape.layers)))

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        (self._cross or self._queries).add(appended)

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        if self._cross is not None:
            self._cross.score(cache, self.window)

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, prefix = cache.seq(layer), self.protected(cache, layer)
        observers = newest(seq, ~prefix, min(self.window, target))
        if target <= self.window:
            return prefix | observers
        past = ~(prefix | observers)
        scores = pooled(self._scores(cache, layer), seq, past, self.kernel, self.pool)
        return prefix | observers | kernels.top_k(scores, seq, past, target - self.window)

    def _scores(self, cache: KVCache, layer: int) -> Float32:
        """u of each row, or PureKV's importance in its place, ``[kv_heads, n]``."""
        if self._cross is not None:
            return self._cross.importance(cache, layer)
        query, query_seq = self._queries.at(cache, layer)
        return kernels.attention_mass(query, query_seq, cache.key(layer), cache.seq(layer), scale=cache.key_scale(layer))


def pooled(score: Float32, seq: NDArray[np.int64], among: Bool, kernel: int, pool: Pool) -> Float32:
    """1-D pooling of ``score`` along ``seq`` over the ``kernel`` nearest rows ``among`` each head's; all ``[kv_heads, n]``.

    As many rows in each head. Neighbours beyond either end are left out; rows not ``among`` get 0.
    """
    count = int(among[0].sum())
    at = np.nonzero(among)[1].reshape(-1, count)
    at = np.take_along_axis(at, np.argsort(np.take_along_axis(seq, at, 1), 1), 1)  # places by rising seq
    line = np.take_along_axis(score, at, 1)
    if pool == "max":
        line = _windows(line, kernel, -np.inf).max(2)
    else:
        near = _windows(np.ones((1, count)), kernel, 0.0).sum(2)
        line = _windows(line, kernel, 0.0).sum(2, dtype=np.float64) / near
    out = np.zeros_like(score)
    np.put_along_axis(out, at, line.astype(np.float32), 1)
    return out


def _windows(line: NDArray[np.floating], kernel: int, beyond: float) -> NDArray[np.floating]:
    """The ``kernel`` values around each of ``line`` ``[h, n]``: ``[h, n, kernel]``, ``beyond`` where they reach out of it."""
    padded = np.pad(line, ((0, 0), (kernel // 2, kernel // 2)), constant_values=beyond)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, 1)
