"""Uniform thinning of frames, online: the "Uniform Select" of InfiniPot-V's comparison (arXiv 2506.15745, App. B.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.policies.base import Bool, SteadyTarget

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Int64 = NDArray[np.int64]


@dataclass
class Uniform(SteadyTarget):
    """Keep whole frames, evenly spaced over the stream so far, the newest always among them; all heads and layers alike.

    While too many tokens are held, one frame goes after another: first one that an earlier compression left incomplete, then
    always the frame between whose neighbours the gap t(next) - t(before) is smallest, of equal gaps the oldest. The first
    frame held goes only before the newest. The frame that goes last loses just as many tokens as must go and keeps its newest
    by seq, so that exactly the target stays and at most that one frame is incomplete.

    target: |C| / |M|, or less where a frame needs more room. |C| does not depend on the rows that come.

    Ours: the paper selects at regular intervals from frames that are all there; a stream has no end, so frames are thinned as
    it grows. After a compression no gap between whole frames is larger than two neighbouring ones together, but for the gap
    before the newest frame.
    """

    target: float = 0.75

    name: ClassVar[str] = "uniform"
    paper: ClassVar[str] = "baseline (Uniform Select of InfiniPot-V, arXiv 2506.15745)"

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, frame, prefix = cache.seq(layer), cache.frame(layer), self.protected(cache, layer)
        mine = ~prefix[0]
        frames, held = np.unique(frame[0, mine], return_counts=True)
        kept = thin(frames.astype(np.int64), held, self.shape.tokens_per_frame, target)
        rows = np.flatnonzero(mine)[np.argsort(-seq[0, mine])]  # newest first
        place = np.searchsorted(frames, frame[0, rows])
        rank = np.empty(len(rows), np.int64)  # among the rows of its frame, from the newest
        order = np.argsort(place, kind="stable")
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(held) - held, held)
        return prefix | np.isin(seq, seq[0, rows[rank < kept[place]]])


def thin(frames: Int64, held: Int64, whole: int, target: int) -> Int64:
    """How many tokens of each frame stay, summing to ``target``.

    frames: rising frame numbers ``[m]``, which hold ``held`` ``[m]`` tokens each; ``whole`` is a complete frame's.
    """
    kept, surplus = held.copy(), int(held.sum()) - target
    there = list(range(len(frames)))
    while surplus > 0:
        goes = there.pop(_next_to_go(frames[there], held[there] < whole))
        kept[goes] -= min(surplus, held[goes])
        surplus -= int(held[goes] - kept[goes])
    return kept


def _next_to_go(frames: Int64, incomplete: Bool) -> int:
    """The place of the frame to drop next: an incomplete one, or that with the smallest gap between its neighbours."""
    last = len(frames) - 1
    if incomplete[:last].any():
        return int(np.argmax(incomplete[:last]))
    return 1 + int(np.argmin(frames[2:] - frames[:-2])) if last > 1 else 0
