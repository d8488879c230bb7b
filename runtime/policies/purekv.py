"""PureKV: attention scores of low layers and value norms rank the cache of every layer. arXiv 2510.25600, eqs. 1 to 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import primitives
from edgevlm.runtime.policies.attention import attention_mass
from edgevlm.runtime.policies.base import Appended, Bool, Float32, Guide, Needs, Plan, Policy, StreamShape, newest
from edgevlm.runtime.policies.queries import QueryWindow

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Int64 = NDArray[np.int64]


class CrossLayer:
    """Importance of tokens in every layer from the attention of layers ``0..clie`` (cross-layer importance estimation).

    It is PureKV's score, and the booster that other policies put in the place of their attention term (Tab. 6): ask for the
    queries of ``probe_layers``, pass what is appended to :meth:`add`, call :meth:`score` once a compression, then
    :meth:`importance` for each layer.
    """

    def __init__(self, layers: int, clie: int, window: int, values: bool = True) -> None:
        self.clie, self.values = min(clie, layers - 1), values
        self.probe_layers = tuple(range(self.clie + 1))
        self._queries = QueryWindow(window)
        self._mass: dict[int, Float32] = {}  # layer <= clie -> S, [kv_heads, n]
        self._last: dict[int, tuple[Int64, Float32]] = {}  # layer > clie -> seq, S of the tokens it held: at most |M| a head

    def add(self, appended: Appended) -> None:
        """Take the queries of rows just published."""
        self._queries.add(appended)

    def score(self, cache: KVCache, window: int) -> None:
        """Eqs. 1 and 2: S in the low layers, the attention that each token gets from the ``window`` newest queries."""
        for layer in self.probe_layers:
            queries, seq = self._queries.at(cache, layer)
            start = max(0, len(seq) - window)
            self._mass[layer] = attention_mass(queries[:, start:], seq[start:], cache.key(layer), cache.seq(layer))

    def importance(self, cache: KVCache, layer: int) -> Float32:
        """Eqs. 3 and 4: ``S ||V||`` of each row of a layer, ``[kv_heads, n]``; S alone without ``values``.

        Above the CLIE layer a token has that layer's S, joined by ``seq`` in its own KV head; one that the CLIE layer has
        dropped has the last S it was given, one that it never scored has 0.
        """
        if layer <= self.clie:
            mass = self._mass[layer]
        else:
            seq, mass = cache.seq(layer), np.zeros(cache.seq(layer).shape, np.float32)
            if layer in self._last:
                _join(mass, seq, *self._last[layer])
            _join(mass, seq, cache.seq(self.clie), self._mass[self.clie])
            self._last[layer] = seq.copy(), mass
        return mass * primitives.value_norms(cache.value(layer)) if self.values else mass


def _join(into: Float32, seq: Int64, known: Int64, score: Float32) -> None:
    """Per head write the score of each ``seq`` ``[H, n]`` that is among ``known`` ``[H, m]``, in any order, to its place."""
    for head in range(len(seq)):
        _, here, there = np.intersect1d(seq[head], known[head], assume_unique=True, return_indices=True)
        into[head, here] = score[head, there]


@dataclass
class PureKV(Policy):
    """Keep the newest tokens and those that the newest queries attend to, weighted by value norms; no scores in high layers.

    clie: the layer whose attention ranks the tokens of all layers above it (0 and 1 do worse, fig. 5). window: the newest rows,
    which stay and whose queries are the observers, at most half of what is kept. cross: off, every layer is ranked by its own
    attention (Tab. 4). values: weight by the L2 norm of the value (Tab. 4). st_spattn: prefill frames by sparse attention in
    space and time in high layers (sec. 3.2); frame 0 then stays, in |M|.

    Ours: a token that the clie layer has dropped keeps the last score it had there; KV heads of two layers meet by number.
    """

    clie: int = 2
    window: int = 32
    cross: bool = True
    values: bool = True
    st_spattn: bool = False

    name: ClassVar[str] = "purekv"
    paper: ClassVar[str] = "PureKV, arXiv 2510.25600"

    def __post_init__(self) -> None:
        if self.clie < 0 or self.window < 1:
            raise ValueError("clie is a layer from 0 up, and window is 1 or more")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        self._cross = CrossLayer(shape.layers, self.clie if self.cross else shape.layers, self.window, self.values)
        self._recent = 0

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=self._cross.probe_layers, variant="st-spattn" if self.st_spattn else "whole")

    @property
    def room(self) -> int:
        """A quarter of |M|: as much is evicted as is asked, and a larger piece would see little of the past."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        self._cross.add(appended)

    def before_append(self, cache: KVCache, rows: int, guide: Guide) -> Plan | None:
        kept = self.shape.tokens_per_frame if self.keeps_first_frame else 0
        self._recent = min(self.window, max(0, self.budget - rows - kept) // 2)
        return super().before_append(cache, rows, guide)

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        self._cross.score(cache, self._recent)

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, keep = cache.seq(layer), self.protected(cache, layer)
        recent = newest(seq, ~keep, self._recent)
        rest = target - self._recent - (int(keep[0].sum()) - self.shape.prefix)
        return keep | recent | primitives.top_k(self._cross.importance(cache, layer), seq, ~(keep | recent), rest)
