"""StreamingLLM: attention sinks and a window of the newest tokens. arXiv 2309.17453."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.base import Appended, Bool, Guide, Needs, Plan, Policy, StreamShape, newest, tokens_of
from edgevlm.runtime.policies.cross_layer import booster, layer_number

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

OBSERVERS = 32  # newest rows, of the window, whose attention PureKV's score is made of


@dataclass
class StreamingLLM(Policy):
    """Keep the prefix, the first vision tokens of the stream as sinks, and a window of the newest.

    sinks: vision tokens at the start of the stream that stay for ever; they count in |M| and come before the window. clie:
    beside sinks and window keep the tokens most important by PureKV's score, from the attention of layers 0 to this one;
    empty: off. important: share of what the sinks leave that goes to those, with ``clie``.

    Ours: the paper's sinks are the first tokens of the text; those are in the prefix, which stays for every policy, and the
    first vision tokens join them. Positions are the session's (made dense when it is due), not places in the cache.
    PureKV's Tab. 6 has "StreamingLLM + PureKV" and does not say how the cache is divided; here half and half.
    """

    sinks: int = 4
    clie: str = ""
    important: float = 0.5

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    state_fields = ("_cross",)

    def __post_init__(self) -> None:
        if self.sinks < 0 or not 0 <= self.important < 1:
            raise ValueError("sinks is 0 or more, and important lies in [0, 1)")
        layer_number(self.clie)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._cross = booster(self.clie, shape.layers, OBSERVERS)
        self._observers = 0

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=self._cross.probe_layers if self._cross else ())

    @property
    def room(self) -> int:
        """A quarter of |M|: the window gives up as much as is asked."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        if self._cross is not None:
            self._cross.add(appended)

    def before_append(self, cache: KVCache, rows: int, guide: Guide) -> Plan | None:
        _, _, window = self._parts(max(0, self.budget - rows))
        self._observers = min(OBSERVERS, window)
        return super().before_append(cache, rows, guide)

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        if self._cross is not None:
            self._cross.score(cache, self._observers)

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        """The oldest rows held are the stream's first: no compression ever took them."""
        seq, prefix = cache.seq(layer), self.protected(cache, layer)
        sinks, important, window = self._parts(target)
        held = int((~prefix[0]).sum())
        keep = ~newest(seq, ~prefix, held - sinks) | newest(seq, ~prefix, window)
        return keep | kernels.top_k(self._cross.importance(cache, layer), seq, ~keep, important) if self._cross else keep

    def _parts(self, target: int) -> tuple[int, int, int]:
        """How many sinks, important tokens and newest tokens ``target`` is divided into."""
        sinks = min(self.sinks, target)
        important = tokens_of(self.important, target - sinks) if self._cross else 0
        return sinks, important, target - sinks - important
