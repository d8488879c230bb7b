"""SnapKV, arXiv 2404.14469: the newest rows observe which past tokens matter; or, offline, the rows of a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.attention import QueryWindow
from edgevlm.runtime.policies.base import (
    Appended,
    Bool,
    Context,
    Float32,
    Needs,
    Policy,
    StreamShape,
    frame_text,
    newest,
    setting,
    tokens_of,
    without_lone_text,
)  # fmt: skip
from edgevlm.runtime.policies.baselines import Full

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

KERNEL, POOL = "width of the pool in tokens, odd", "pool by max or avg; missing neighbours are left out"


@dataclass
class SnapKV(Policy):
    """Keep the newest rows, which observe, and the past tokens that they attend to most.

    u_t = sum over the observers i of softmax(q_i K^T / sqrt(D))_t, summed over the query heads of a KV head, pooled over the
    neighbours along ``seq``; each KV head keeps its own top of u (InfiniPot-V, App. D.1, eq. 1, in its continual setting).

    Ours: one choice per KV head, where the authors' program repeats keys and chooses per query head. Scores are summed over the
    group before pooling, which excludes prefix and observers. If |C| is less than the window, the newest |C| tokens stay.
    """

    window: int = setting(32, "newest rows that observe and stay", at_least=1)
    kernel: int = setting(7, KERNEL, at_least=1)
    pool: Literal["max", "avg"] = setting("max", POOL)
    target: float = setting(0.75, "|C| / |M|", above=0, at_most=1)

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    state_fields = ("_queries",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_kernel(self.kernel)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._queries = QueryWindow(self.window)

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=tuple(range(self.shape.layers)))

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        self._queries.add(appended)

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        return {layer: self._select(cache, layer, target) for layer, target in targets.items()}

    def _select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, fixed = cache.seq(layer), self.protected(cache, layer)
        keep = fixed | newest(seq, ~fixed, min(self.window, target))
        if target <= self.window:
            return keep
        query, query_seq = self._queries.at(cache, layer)
        score = kernels.attention_mass(query, query_seq, cache.key(layer), seq, scale=cache.key_scale(layer))
        return keep | kernels.top_k(pooled(score, seq, ~keep, self.kernel, self.pool), seq, ~keep, target - self.window)


@dataclass
class SnapKVGuided(Full):
    """Keep everything until a question comes, then only what it attends to most. The budget is a capacity.

    u_t = sum over the question's last rows i of softmax(q_i K^T / sqrt(D))_t, pooled as in snapkv; each KV head keeps its own
    top |C| (InfiniPot-V, App. D.1, eq. 1, and the contrast of its App. C).

    Ours: here a question changes the memory. A second one sees what the first left, and the frames since.
    """

    target: float = setting(0.25, "|C| / |M|: what a question leaves", above=0, at_most=1)
    window: int = setting(32, "last rows of the question, which observe", at_least=1)
    kernel: int = setting(7, KERNEL, at_least=1)
    pool: Literal["max", "avg"] = setting("max", POOL)

    name: ClassVar[str] = "snapkv-guided"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_kernel(self.kernel)

    @property
    def needs(self) -> Needs:
        return Needs(question_layers=tuple(range(self.shape.layers)))

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)

    def under_question(self, cache: KVCache, queries: Mapping[int, Float32]) -> list[Bool | None]:
        return [self._kept(cache, layer, queries[layer]) for layer in range(self.shape.layers)]

    def _kept(self, cache: KVCache, layer: int, query: Float32) -> Bool | None:
        """Rows of a layer to keep, ``[kv_heads, n]``: prefix, question, and |C| others. query: ``[heads, rows, head_dim]``."""
        seq, memory = cache.seq(layer), int(cache.lengths[layer]) - query.shape[1]
        if memory - self.shape.prefix <= self.compress_to:
            return None
        asked, asked_seq = query[:, -self.window :], seq[0, memory:][-self.window :]
        mass = kernels.attention_mass(asked, asked_seq, cache.key(layer), seq, scale=cache.key_scale(layer))
        keep = self.protected(cache, layer)
        keep[:, memory:] = True
        count = max(0, self.compress_to - int(frame_text(cache, layer)[0].sum()))
        chosen = kernels.top_k(pooled(mass, seq, ~keep, self.kernel, self.pool), seq, ~keep, count)
        return without_lone_text(cache, layer, keep | chosen)


def _check_kernel(kernel: int) -> None:
    if kernel % 2 == 0:
        raise ValueError("kernel must be odd")


def pooled(score: Float32, seq: NDArray[np.int64], among: Bool, kernel: int, pool: str) -> Float32:
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
