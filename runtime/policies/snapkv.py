"""The policy SnapKV, arXiv 2404.14469, keeps the past tokens that the newest rows attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.policies.attention import QueryWindow
from edgevlm.runtime.policies.base import Appended, FixedTarget, Needs, StreamShape, setting
from edgevlm.runtime.policies.layer import Bool, Float32, Layer


@dataclass
class SnapKV(FixedTarget):
    """Keep the newest rows, and the past tokens that these rows attend to most.

    A token's score is the sum of softmax(q_i K^T / sqrt(D))_t over the newest rows i and a KV head's query heads. Scores are
    max-pooled along ``seq``. Each KV head keeps the tokens with its highest scores (InfiniPot-V, appendix D.1, eq. 1).

    Ours: each KV head chooses once, by scores summed over its query heads. The authors' code chooses separately for each query
    head. Pooling leaves out the prefix and the newest rows. If |C| is less than ``window``, the newest |C| tokens stay.
    """

    window: int = setting(32, "number of newest rows to keep, whose queries score older rows", at_least=1)
    kernel: int = setting(7, "width of max pooling in tokens, an odd number; missing neighbours are skipped", at_least=1)
    target: float = setting(0.75, "fraction of |M| that a compression keeps", above=0, at_most=1)

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    state_fields = ("_queries",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise ValueError("kernel must be odd")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._queries = QueryWindow(self.window)

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=tuple(range(self.shape.layers)))

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        self._queries.add(appended)

    def compress(self, layer: Layer) -> None:
        keep = layer.newest(min(self.window, layer.target))
        if layer.target > self.window:
            past = layer.free & ~keep
            score = pooled(layer.attention_of(self._queries), layer.seq, past, self.kernel)
            keep |= layer.top(score, layer.target - self.window, past)
        layer.keep(keep)


def pooled(score: Float32, seq: NDArray[np.int64], among: Bool, kernel: int) -> Float32:
    """Replace each row's score with the largest score of the ``kernel`` rows nearest by ``seq``.

    ``among``: a mask of the rows that take part, with the same number of rows in each head. The score of all other rows becomes
    0. Neighbours beyond the first or last row are skipped. Returns ``[kv_heads, n]``.
    """
    count = int(among[0].sum())
    at = np.nonzero(among)[1].reshape(-1, count)
    at = np.take_along_axis(at, np.argsort(np.take_along_axis(seq, at, 1), 1), 1)  # indices in ascending order of seq
    padded = np.pad(np.take_along_axis(score, at, 1), ((0, 0), (kernel // 2, kernel // 2)), constant_values=np.float32(-np.inf))
    out = np.zeros_like(score)
    np.put_along_axis(out, at, np.lib.stride_tricks.sliding_window_view(padded, kernel, 1).max(2), 1)
    return out
