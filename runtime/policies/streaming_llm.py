"""The policy StreamingLLM, arXiv 2309.17453, keeps attention sinks and a window of the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edgevlm.runtime.policies.base import EvictsOnDemand, setting
from edgevlm.runtime.policies.layer import Layer


@dataclass
class StreamingLLM(EvictsOnDemand):
    """Keep the stream's first vision tokens as attention sinks, and a window of the newest tokens.

    The paper's sinks are the first text tokens, which are in the prefix and always stay. Ours: the first vision tokens are
    sinks too. Positions count from the start of the session, not of the cache.
    """

    sinks: int = setting(
        4, "number of vision tokens at the start of the stream that always stay; they count in |M|", at_least=0
    )

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def compress(self, layer: Layer) -> None:
        """Keep the oldest rows as sinks. The oldest rows are the stream's first, because sinks are never evicted."""
        sinks = min(self.sinks, layer.target)
        younger = layer.newest(int(layer.free[0].sum()) - sinks)
        layer.keep((layer.free & ~younger) | layer.newest(layer.target - sinks))
