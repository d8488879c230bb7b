"""StreamingLLM: attention sinks and a window of the newest tokens. arXiv 2309.17453."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime.policies.base import Bool, Context, EvictsOnDemand, newest, setting

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class StreamingLLM(EvictsOnDemand):
    """Keep the stream's first vision tokens as attention sinks, and a window of the newest.

    Ours: the paper's sinks are the first text tokens, which are in the prefix and always stay; the first vision tokens are
    added. Positions are the session's, re-indexed when due, not indices in the cache.
    """

    sinks: int = setting(4, "first vision tokens, which always stay and count in |M|", at_least=0)

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        """The oldest rows held are the stream's first: no compression ever took them."""
        keep = {}
        for layer, target in targets.items():
            seq, others, sinks = cache.seq(layer), ~self.protected(cache, layer), min(self.sinks, target)
            keep[layer] = ~newest(seq, others, int(others[0].sum()) - sinks) | newest(seq, others, target - sinks)
        return keep
