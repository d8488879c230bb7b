"""Define policies that use no keys or queries: full, sliding window, the last frames, uniform thinning, random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.policies.base import (
    EvictsOnDemand,
    Needs,
    Plan,
    Policy,
    SteadyTarget,
    StreamShape,
    setting,
    without_lone_text,
)
from edgevlm.runtime.policies.layer import Bool, Float32, Layer, layers_of

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
TARGET = "fraction of |M| that a compression keeps, or less if a frame needs more room"
STEP = np.uint64(0x9E3779B97F4A7C15)  # the increment and the multipliers of SplitMix64
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass
class Full(Policy):
    """Keep everything. When the budget is used up, the stream ends with an error. Positions are never re-indexed."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "the uncompressed cache"
    bounded: ClassVar[bool] = False

    @property
    def max_append(self) -> int:
        return self.budget


@dataclass
class SlidingWindow(EvictsOnDemand):
    """Evict the oldest tokens by ``seq``, exactly as many as new rows need."""

    name: ClassVar[str] = "sliding-window"
    paper: ClassVar[str] = "baseline (FIFO)"

    def score(self, layer: Layer) -> Float32:
        return np.zeros(layer.seq.shape, np.float32)


@dataclass
class SimpleStream(Policy):
    """Keep only the last k frames, or fewer if the budget holds fewer whole frames.

    If only changed tokens are appended, a token stays as long as its patch was unchanged in at least one of the last k frames.
    Questions also see the whole newest frame.

    Ours: the paper prefills the last frames again for each question. In edgevlm, each frame is prefilled once, after the k - 1
    frames before it.
    """

    k: int = setting(4, "number of newest frames to keep", at_least=1)

    name: ClassVar[str] = "simple-stream"
    paper: ClassVar[str] = "SimpleStream, arXiv 2604.02317"

    def attach(self, budget: int, shape: StreamShape) -> None:
        self._per_frame = shape.tokens_per_frame + shape.text_per_frame
        self._frames = self.k if shape.thinned else min(self.k, max(1, budget // self._per_frame))
        super().attach(min(budget, self._frames * self._per_frame), shape)

    @property
    def needs(self) -> Needs:
        return Needs(single_frames=True)  # a frame attends only to the k - 1 frames before it

    def score(self, layer: Layer) -> Float32:
        """Prefer rows with a high ``confirmed``. Scores are needed only if the changes of k frames exceed the budget."""
        return (layer.confirmed - layer.confirmed.max()).astype(np.float32)

    def before_append(self, cache: KVCache, rows: int, *others: Any) -> Plan | None:
        """Evict frames older than the last k, even if there is room for them."""
        coming = 1 if self.shape.thinned else rows // self._per_frame
        oldest = int(cache.confirmed(0).max(initial=-1)) + coming - self._frames + 1
        keep = [without_lone_text(layer, layer.fixed | (layer.confirmed >= oldest)) for layer in layers_of(cache)]
        held = max(int(mask[0].sum()) for mask in keep) - self.shape.prefix
        if held + rows > self.budget:
            return super().before_append(cache, rows, *others)
        return None if all(mask.all() for mask in keep) else Plan([*keep])


@dataclass
class Uniform(SteadyTarget):
    """Keep whole frames, evenly spaced over the stream and including the newest. All heads and layers keep the same frames.

    Frames are evicted one at a time until few enough tokens are left. A frame that an earlier compression left incomplete is
    evicted first, then the frame whose neighbours are closest in time. The oldest frame wins ties. The stream's first frame
    is evicted only after all others except the newest. The last frame to be evicted loses only its oldest tokens, so that
    exactly the target number of tokens stays.

    Ours: the paper selects frames at regular intervals from a complete video. In edgevlm, frames are thinned as the stream
    grows. If only changed tokens are appended, no frame counts as incomplete.
    """

    target: float = setting(0.75, TARGET, above=0, at_most=1)

    name: ClassVar[str] = "uniform"
    paper: ClassVar[str] = "baseline (Uniform Select of InfiniPot-V, arXiv 2506.15745)"

    def compress(self, layer: Layer) -> None:
        seq, frame, mine = layer.seq, layer.frame, layer.free[0]
        frames, held = np.unique(frame[0, mine], return_counts=True)
        kept = thin(frames.astype(np.int64), held, 1 if self.shape.thinned else self.shape.tokens_per_frame, layer.target)
        rows = np.flatnonzero(mine)[np.argsort(-seq[0, mine])]  # newest first
        at = np.searchsorted(frames, frame[0, rows])
        rank = np.empty(len(rows), np.int64)  # each row's rank in its frame, newest first
        order = np.argsort(at, kind="stable")
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(held) - held, held)
        layer.keep(np.isin(seq, seq[0, rows[rank < kept[at]]]))


def thin(frames: Int64, held: Int64, per_frame: int, target: int) -> Int64:
    """Return how many tokens of each frame stay, ``target`` in total.

    ``frames``: ascending frame numbers, ``[m]``. ``held``: the number of tokens of each frame, ``[m]``. ``per_frame``: the
    number of tokens in a whole frame.
    """
    kept, surplus = held.copy(), int(held.sum()) - target
    there = list(range(len(frames)))
    while surplus > 0:
        goes = there.pop(_next_to_go(frames[there], held[there] < per_frame))
        kept[goes] -= min(surplus, held[goes])
        surplus -= int(held[goes] - kept[goes])
    return kept


def _next_to_go(frames: Int64, incomplete: Bool) -> int:
    last = len(frames) - 1
    if incomplete[:last].any():
        return int(np.argmax(incomplete[:last]))
    return 1 + int(np.argmin(frames[2:] - frames[:-2])) if last > 1 else 0


@dataclass
class RandomTokens(SteadyTarget):
    """Keep a random sample of the tokens. After a compression, every token of the stream so far is in the memory with equal
    probability.

    All layers and heads hold the same tokens. As in reservoir sampling, the tokens with the highest priorities stay. A token's
    priority is a fixed hash of ``seed`` and the token's ``seq``. The hash is a bijection on 64-bit numbers, so there are no
    ties.
    """

    seed: int = setting(0, "seed of the hash that gives each token its priority")
    target: float = setting(0.75, TARGET, above=0, at_most=1)

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "baseline (reservoir sampling)"

    def score(self, layer: Layer) -> Float32:
        """Return each token's rank by priority. A float32 holds the rank exactly, but not the priority."""
        seq = layer.seq
        drawn = priority(seq, mix(mix(np.full(1, self.seed % 2**64, np.uint64))))
        rank = np.empty(seq.shape, np.float32)
        np.put_along_axis(rank, np.argsort(drawn, 1), np.arange(seq.shape[1], dtype=np.float32)[None], 1)
        return rank


def priority(seq: NDArray[np.int64], key: UInt64) -> UInt64:
    """Return the priority of each token. No two tokens have the same priority."""
    return mix(mix(seq.astype(np.uint64)) ^ key)


def mix(x: UInt64) -> UInt64:
    """Hash 64-bit numbers with SplitMix64, a bijection whose outputs look random."""
    x = x + STEP
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))
