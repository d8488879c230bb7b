"""StreamingLLM: attention sinks and a window of the newest tokens. arXiv 2309.17453."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.attention import Boosted
from edgevlm.runtime.policies.base import Appended, Bool, Context, newest, setting, tokens_of

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

OBSERVERS = 32  # newest rows, of the window, whose attention PureKV's score is made of


@dataclass
class StreamingLLM(Boosted):
    """Keep the stream's first vision tokens as attention sinks, and a window of the newest.

    Ours: the paper's sinks are the first text tokens, which are in the prefix and always stay; the first vision tokens are
    added. Positions are the session's, re-indexed when due, not indices in the cache. PureKV's Tab. 6 does not say how
    "StreamingLLM + PureKV" divides the cache; here half and half.
    """

    sinks: int = setting(
        4,
        "first vision tokens, which always stay and count in |M|",
        at_least=0,
    )
    important: float = setting(0.5, "with clie: fraction for important tokens of what the sinks leave", at_least=0, below=1)

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    state_fields = ("_cross",)

    @property
    def observers(self) -> int:
        return OBSERVERS

    @property
    def own_probes(self) -> tuple[int, ...]:
        return ()

    @property
    def max_append(self) -> int:
        """A quarter of |M|: the window gives up as much as is asked."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        if self._cross is not None:
            self._cross.add(appended)

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        """The oldest rows held are the stream's first: no compression ever took them."""
        targets = {layer: self.beside_first_frame(cache, layer, target) for layer, target in targets.items()}
        keep = {layer: self._sinks_and_window(cache, layer, target) for layer, target in targets.items()}
        if self._cross is None:
            return keep
        first = self.shape.tokens_per_frame if self.keeps_first_frame else 0
        _, _, window = self._parts(max(0, self.budget - context.rows - first))
        importance = self._cross.importance(cache, targets, self._cross.attention(cache, min(OBSERVERS, window)))
        for layer, target in targets.items():
            keep[layer] |= kernels.top_k(importance[layer], cache.seq(layer), ~keep[layer], self._parts(target)[1])
        return keep

    def _sinks_and_window(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, others = cache.seq(layer), ~self.protected(cache, layer)
        sinks, _, window = self._parts(target)
        return ~newest(seq, others, int(others[0].sum()) - sinks) | newest(seq, others, window)

    def _parts(self, target: int) -> tuple[int, int, int]:
        """How many sinks, important tokens and newest tokens ``target`` is divided into."""
        sinks = min(0 if self.keeps_first_frame else self.sinks, target)
        important = tokens_of(self.important, target - sinks) if self._cross else 0
        return sinks, important, target - sinks - important
