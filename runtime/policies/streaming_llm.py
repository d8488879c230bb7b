"""StreamingLLM: attention sinks and a window of the newest tokens. arXiv 2309.17453."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Bool, Policy, newest

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class StreamingLLM(Policy):
    """Keep the prefix, the first vision tokens of the stream as sinks, and a window of the newest.

    sinks: vision tokens at the start of the stream that stay for ever; they count in |M| and come before the window.

    Ours: the paper's sinks are the first tokens of the text; those are in the prefix, which stays for every policy, and the
    first vision tokens join them. Positions are the session's (made dense when it is due), not places in the cache.
    """

    sinks: int = 4

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError("sinks is 0 or more")

    @property
    def room(self) -> int:
        """A quarter of |M|: the window gives up as much as is asked."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        """The oldest rows held are the stream's first: no compression ever took them."""
        seq, prefix = cache.seq(layer), cache.kind(layer) == Kind.PREFIX
        sinks, held = min(self.sinks, target), int((~prefix[0]).sum())
        return ~newest(seq, ~prefix, held - sinks) | newest(seq, ~prefix, target - sinks)
