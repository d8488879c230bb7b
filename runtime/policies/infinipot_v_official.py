"""InfiniPot-V's choice as its authors' program makes it: on pseudo-frames, the tokens that are left cut into frames by age."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Bool

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Float64 = NDArray[np.float64]


def official_choice(cache: KVCache, layer: int, target: int, per_frame: int, alpha: float, recent: float) -> Bool:
    """Rows to keep, ``[kv_heads, n_l]``: the prefix and ``target`` vision tokens a head, of which it holds whole frames.

    The i-th oldest token of a head stands for patch ``i % per_frame`` of frame ``i // per_frame``, whatever it was. recent: the
    share of the frames now held that is recent, rounded down, one at least; with ``alpha`` 0 none is.
    """
    kind, seq = cache.kind(layer), cache.seq(layer)
    vision = kind == Kind.VISION
    count = int(vision[0].sum())
    slots = np.argsort(np.where(vision, seq, np.iinfo(np.int64).max), 1, kind="stable")[:, :count]
    held = (cache.numbers("key", layer), cache.numbers("value", layer))
    key, value = (np.take_along_axis(part, slots[..., None], 1).astype(np.float64) for part in held)
    order, everything = np.take_along_axis(seq, slots, 1), np.ones(slots.shape, np.bool_)
    rows = int(cache.row(layer)[vision].max()) + 1
    score = pooled(np.linalg.norm(value, axis=-1), 4 * layer // cache.layers, per_frame, rows)
    if alpha > 0:
        new = per_frame * max(1, int(recent * (count // per_frame) + 1e-9))
        past = everything & (np.arange(count) < count - new)
        distinct = np.zeros(slots.shape)
        distinct[:, : count - new] = distinctness(key, count - new, per_frame)
        quota = max(0, target - round((1 - alpha) * target) - new)
        score[~past | kernels.top_k(distinct.astype(np.float32), order, past, quota)] = np.inf
    kept = kernels.top_k(score.astype(np.float32), order, everything, target)
    keep: Bool = kind == Kind.PREFIX
    np.put_along_axis(keep, slots, kept, 1)
    return keep


def distinctness(key: Float64, past: int, per_frame: int) -> Float64:
    """Eq. 4 on pseudo-frames: minus the mean cosine with the recent keys of the same patch, ``[H, past]``.

    key: rotated, oldest first, ``[H, n, D]``, the first ``past`` of them old.
    """
    unit = key / (np.linalg.norm(key, axis=-1, keepdims=True) + 1e-9)
    frames = unit.reshape(len(key), -1, per_frame, key.shape[-1])
    old, new = frames[:, : past // per_frame], frames[:, past // per_frame :]
    similarity: Float64 = np.einsum("hfpd,hpd->hfp", old, new.mean(1))
    return -similarity.reshape(len(key), past)


def pooled(norms: Float64, quarter: int, per_frame: int, rows: int) -> Float64:
    """VaN by quarter of the depth, ``[H, n]``: means over 7 x 7 and 5 x 5 patches, over 3 tokens, and none; zeros outside."""
    if quarter == 3:
        return norms
    if quarter == 2:
        return np.asarray(sliding_window_view(np.pad(norms, ((0, 0), (1, 1))), 3, 1).mean(-1))
    reach = (3, 2)[quarter]
    grid = np.pad(norms.reshape(len(norms), -1, rows, per_frame // rows), ((0, 0), (0, 0), (reach, reach), (reach, reach)))
    windows = sliding_window_view(grid, (2 * reach + 1,) * 2, (2, 3))
    return np.asarray(windows.mean((-2, -1)).reshape(norms.shape))
