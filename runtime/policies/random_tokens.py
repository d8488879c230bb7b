"""Random tokens: a reservoir over everything seen. The baseline that every score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.policies.base import Bool, SteadyTarget

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

UInt64 = NDArray[np.uint64]
STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment and multipliers
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass
class RandomTokens(SteadyTarget):
    """Keep the |C| tokens of the largest pseudo-random priority: after a compression every token of the stream so far is held
    with the same probability, |C| / seen.

    A token's priority is a hash of seed and ``seq``, the same whenever it is asked for, so the largest of all seen are the
    largest of those held and the newcomers: a reservoir. It is a bijection of 64 bits: no two tokens tie. |C| does not depend
    on the rows that come, and tokens newer than the last compression are all held.

    seed: of the hash. heads: all layers and heads hold the same tokens (``alike``), or each draws its ``own``. target:
    |C| / |M|, or less where a frame needs more room.
    """

    seed: int = 0
    heads: Literal["alike", "own"] = "alike"
    target: float = 0.75

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "baseline (reservoir sampling)"

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, mine = cache.seq(layer), ~self.protected(cache, layer)
        if target == 0:
            return ~mine
        drawn = np.where(mine, priority(seq, self._streams(layer, len(seq))), np.uint64(0))
        least = np.partition(drawn, -target, axis=1)[:, -target, None]
        return ~mine | (drawn >= least)

    def _streams(self, layer: int, heads: int) -> UInt64:
        """The key of each head's hash, ``[kv_heads, 1]``: of the seed alone, or of layer and head too."""
        index = 1 + layer * heads + np.arange(heads) if self.heads == "own" else np.zeros(heads, np.int64)
        return mix(mix(np.full(heads, self.seed % 2**64, np.uint64)) + index.astype(np.uint64))[:, None]


def priority(seq: NDArray[np.int64], key: UInt64) -> UInt64:
    """The priority of each token; under one key no two are the same."""
    return mix(mix(seq.astype(np.uint64)) ^ key)


def mix(x: UInt64) -> UInt64:
    """SplitMix64, a bijection of 64 bits whose outputs look random."""
    x = x + STEP
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))
