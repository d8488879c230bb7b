"""First in, first out: the newest |M| vision tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime.policies.base import Bool, Policy, newest

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class SlidingWindow(Policy):
    """Evicts the oldest tokens by ``seq``, just as many as the coming rows need."""

    name: ClassVar[str] = "sliding-window"
    paper: ClassVar[str] = "baseline (FIFO)"

    @property
    def room(self) -> int:
        """A quarter of |M|: a window evicts as much as is asked, and a larger piece would see little of the past."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        prefix = self.protected(cache, layer)
        return prefix | newest(cache.seq(layer), ~prefix, target)
