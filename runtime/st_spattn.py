"""What the frames of a prefill see of the memory under PureKV's ST-SpAttn (arXiv 2510.25600, sec. 3.2).

A token sees the prefix, frame 0, its own frame up to itself, and the token at its own patch in the frame before. Holes are
filled from the tail and prefix and frame 0 never leave, so these two stay where they were first written: slots
``[0, prefix + tokens_per_frame)`` of every layer and head. A frame's token before it may be in another slot of each head.
"""

from __future__ import annotations

import numpy as np

from edgevlm.errors import CacheError
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.engine import FramePattern


def frame_pattern(cache: KVCache, prefix: int, frame: int, grid: tuple[int, int]) -> FramePattern:
    """The pattern of a call whose first frame is ``frame`` (1 or later) of ``grid`` (rows, columns) tokens.

    Frame 1 has no token before it beside those of frame 0, which it sees anyway. Raises CacheError if frame 0 has left its
    place, which a policy that prefills so must not let happen.
    """
    rows, columns = grid
    shared = prefix + rows * columns
    previous = np.full((cache.layers, cache.kv_heads, rows * columns), -1, np.int64)
    for layer in range(cache.layers):
        vision = cache.kind(layer) == Kind.VISION
        first = (vision & (cache.frame(layer) == 0))[:, prefix:shared]
        if frame < 1 or first.size != previous[layer].size or not first.all():
            raise CacheError(f"layer {layer}: ST-SpAttn needs frame 0 in rows {prefix} to {shared}, and it is not there")
        if frame == 1:
            continue
        head, slot = np.nonzero(vision & (cache.frame(layer) == frame - 1))
        place = cache.row(layer)[head, slot].astype(np.int64) * columns + cache.col(layer)[head, slot]
        previous[layer, head, place] = slot
    return FramePattern(shared, previous)
