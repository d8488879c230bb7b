"""The scores and choices that policies are made of, in C++ and without the GIL.

Arrays may be strided views of a :class:`~edgevlm.runtime.cache.KVCache`; keys and values must be dense in their last
axis. dtypes must be exactly those stated, else CacheError. Kernels given a view of a cache work in that cache's own
scratch, one call at a time, and allocate nothing but the result. :mod:`edgevlm.runtime.reference` has a plain numpy
twin of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native

__all__ = ["pool_norms", "temporal_similarity", "top_k", "value_norms"]


def temporal_similarity(
    key: NDArray[np.float32],  # [H, n, D], as stored, rotated
    position: NDArray[np.int32],  # [H, n, axes]
    row: NDArray[np.int16],  # [H, n]
    col: NDArray[np.int16],  # [H, n]
    recent: NDArray[np.bool_],  # [H, n]
    valid: NDArray[np.bool_],  # [H, n]
    inv_freq: NDArray[np.float64],  # [D / 2]
    *,
    rotated: bool = False,
) -> NDArray[np.float32]:
    """InfiniPot-V eq. 4 before its sign: the mean cosine of each past key with the recent keys of its own patch.

    Per head, over the recent tokens with the same (row, col), on un-rotated keys (``rotated``: as stored; the only way
    if axes > 1). Returns float32 ``[H, n]``: -1 where a patch has no recent token, so that the negated score is +1; 0
    for rows that are recent or not ``valid``. A zero vector has cosine 0 with everything. O(n (D + log n)).
    """
    return _native.temporal_similarity(key, position, row, col, recent, valid, inv_freq, rotated)


def value_norms(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """L2 norms ``[H, n]`` of values float32 ``[H, n, D]``, summed in double: the V of InfiniPot-V's VaN."""
    return _native.value_norms(value)


def pool_norms(
    norms: NDArray[np.float32],  # [H, n]
    frame: NDArray[np.int32],  # [H, n]
    row: NDArray[np.int16],  # [H, n]
    col: NDArray[np.int16],  # [H, n]
    valid: NDArray[np.bool_],  # [H, n]
    window: int,
) -> NDArray[np.float32]:
    """InfiniPot-V's VaN pooling: the mean norm of the ``window x window`` patches around a token, in its frame.

    Per head. Absent neighbours are left out of the mean. window: 1, 3, 5 or 7. Returns float32 ``[H, n]``, 0 where not
    ``valid``. O(n (window^2 + log n)).
    """
    return _native.pool_norms(norms, frame, row, col, valid, window)


def top_k(
    scores: NDArray[np.float32],  # [H, n]
    seq: NDArray[np.int64],  # [H, n]
    candidates: NDArray[np.bool_],  # [H, n]
    k: int,
) -> NDArray[np.bool_]:
    """Per head the k candidates of the highest score, or all of them if there are fewer: bool ``[H, n]``.

    Of equal scores the newer ``seq`` wins, then the lower row. NaN is lower than every number. O(n).
    """
    return _native.top_k(scores, seq, candidates, k)
