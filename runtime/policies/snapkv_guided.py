"""SnapKV guided by a question, offline: all is held until one comes, and what it does not look at is lost to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.base import Bool, Float32, Needs, frame_text, tokens_of, without_lone_text
from edgevlm.runtime.policies.full import Full
from edgevlm.runtime.policies.snapkv import Pool, pooled

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class SnapKVGuided(Full):
    """Hold everything up to a declared capacity; when a question comes, keep what it attends to most, from then on.

    u_t = sum over the question's last rows i of softmax(q_i K^T / sqrt(D))_t, pooled as in snapkv; each KV head keeps its own
    top |C| (InfiniPot-V, App. D.1, eq. 1, and the contrast of its App. C).

    target: |C| / |M|, what a question leaves of the capacity. window: how many of the question's last rows observe. kernel:
    tokens that the pool spans, odd. pool: ``max`` or ``avg`` over the kernel, absent neighbours left out.

    Ours: the exception to the rule that a question never changes the memory. A second question sees what the first has left
    and the frames since.
    """

    target: float = 0.25
    window: int = 32
    kernel: int = 7
    pool: Pool = "max"

    name: ClassVar[str] = "snapkv-guided"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0 or not 0 < self.target <= 1:
            raise ValueError("window is 1 or more, kernel odd, and target lies in (0, 1]")

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
        asked, places, scale = query[:, -self.window :], seq[0, memory:][-self.window :], cache.key_scale(layer)
        mass = kernels.attention_mass(asked, places, cache.key(layer), seq, scale=scale)
        keep = self.protected(cache, layer)
        keep[:, memory:] = True
        count = max(0, self.compress_to - int(frame_text(cache, layer)[0].sum()))
        chosen = kernels.top_k(pooled(mass, seq, ~keep, self.kernel, self.pool), seq, ~keep, count)
        return without_lone_text(cache, layer, keep | chosen)
