"""Cross-layer importance estimation: the attention of a low layer ranks all layers above it. PureKV, arXiv 2510.25600."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.base import Appended, Float32
from edgevlm.runtime.policies.queries import QueryWindow
from edgevlm.runtime.stateful import Stateful

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Int64 = NDArray[np.int64]


class CrossLayer(Stateful):
    """Importance of tokens in every layer from the attention of layers ``0..clie``.

    It is PureKV's score, and the booster that other policies put in the place of their attention term (Tab. 6): ask for the
    queries of ``probe_layers``, pass what is appended to :meth:`add`, call :meth:`score` once a compression, then
    :meth:`importance` for each layer. A policy with sums of its own gives them to :meth:`take` instead; its ``window`` is 0.
    """

    state_fields = ("_queries", "_last_seq", "_last_mass")

    def __init__(self, layers: int, clie: int, window: int = 0, values: bool = True) -> None:
        self.layers, self.clie, self.values = layers, min(clie, layers - 1), values
        self.probe_layers = tuple(range(self.clie + 1))
        self._queries = QueryWindow(window)
        self._mass: dict[int, Float32] = {}  # layer <= clie -> S, [kv_heads, n]
        self._last_seq: dict[int, Int64] = {}  # layer > clie -> the tokens it held, at most |M| a head
        self._last_mass: dict[int, Float32] = {}  # and their S

    def add(self, appended: Appended) -> None:
        """Take the queries of rows just published."""
        self._queries.add(appended)

    def score(self, cache: KVCache, window: int) -> None:
        """Eqs. 1 and 2: S in the low layers, the attention that each token gets from the ``window`` newest queries."""
        mass = {}
        for layer in self.probe_layers:
            queries, seq = self._queries.at(cache, layer)
            start = max(0, len(seq) - window)
            held, scale = (cache.key(layer), cache.seq(layer)), cache.key_scale(layer)
            mass[layer] = kernels.attention_mass(queries[:, start:], seq[start:], *held, scale=scale)
        self.take(cache, mass)

    def take(self, cache: KVCache, mass: Mapping[int, Float32]) -> None:
        """S of the low layers, layer -> ``[kv_heads, n]``, and of the tokens of every layer above, from the CLIE layer.

        A token has S of its own KV head there, joined by ``seq``; one that the CLIE layer has dropped has the last S it was
        given, one that it never scored has 0.
        """
        self._mass = dict(mass)
        for layer in range(self.clie + 1, self.layers):
            seq, above = cache.seq(layer), np.zeros(cache.seq(layer).shape, np.float32)
            if layer in self._last_seq:
                _join(above, seq, self._last_seq[layer], self._last_mass[layer])
            _join(above, seq, cache.seq(self.clie), mass[self.clie])
            self._last_seq[layer], self._last_mass[layer] = seq.copy(), above

    def importance(self, cache: KVCache, layer: int) -> Float32:
        """Eqs. 3 and 4: ``S ||V||`` of each row of a layer, ``[kv_heads, n]``; S alone without ``values``."""
        mass = self._mass[layer] if layer <= self.clie else self._last_mass[layer]
        return mass * kernels.value_norms(cache.value(layer), cache.value_scale(layer)) if self.values else mass


def booster(clie: str, layers: int, window: int = 0) -> CrossLayer | None:
    """What the setting ``clie`` of a policy that ranks by attention asks for; empty: nothing."""
    layer = layer_number(clie)
    return None if layer is None else CrossLayer(layers, layer, window)


def layer_number(clie: str) -> int | None:
    """The layer that a setting names; None where it is empty. Raises ValueError."""
    if not clie:
        return None
    if not clie.isdecimal():
        raise ValueError("clie is a layer from 0 up, or empty")
    return int(clie)


def _join(into: Float32, seq: Int64, known: Int64, score: Float32) -> None:
    """Per head write the score of each ``seq`` ``[H, n]`` that is among ``known`` ``[H, m]``, in any order, to its place."""
    place = kernels.index_of(seq, known)
    if known.shape[1]:
        np.copyto(into, np.take_along_axis(score, place, 1), where=place >= 0)
