"""The scores and choices that policies are made of, in C++ and without the GIL.

Arrays may be strided views of a :class:`~edgevlm.runtime.cache.KVCache`; keys and values must be dense in their last
axis, float32 or float16; other arrays whose rows are not dense are copied. dtypes must be exactly those stated, else
CacheError. Kernels given a view of a cache work in that cache's own scratch, one call at a time, and allocate nothing but
the result. tests/reference.py has a plain numpy twin of each, in float64. Rows and caches on a CUDA device go to the
kernels there (:mod:`edgevlm.runtime.cuda.kernels`): the same choices of the same scores, sums within float32 rounding.

Inner loops are those of the best instruction set the processor has: avx512, avx2, neon or scalar, or the one that
``EDGEVLM_SIMD`` names when this module is imported. Heads and layers are shared out over :func:`set_threads` threads, one
unless set. Results are the same bits whatever the number of threads; between instruction sets sums may differ in the last
places.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

__all__ = [
    "attention_mass",
    "index_of",
    "infinipot_scores",
    "infinipot_select",
    "join",
    "levels",
    "newer_similarity",
    "newest_frames",
    "patch_distances",
    "patch_sums",
    "pool_norms",
    "set_threads",
    "simd",
    "temporal_similarity",
    "threads",
    "top_k",
    "use_simd",
    "value_norms",
]


def simd() -> str:
    """The instruction set in use: avx512, avx2, neon or scalar."""
    return _native.simd()


def use_simd(name: str) -> None:
    """Use another instruction set from now on; raises CacheError if this processor does not have it. For tests."""
    _native.use_simd(name)


def threads() -> int:
    """Threads that a kernel may use."""
    return _native.threads()


def set_threads(count: int) -> None:
    """Let kernels use up to ``count`` threads, the calling one included (1..256).

    Set it before a cache is made: a cache has working memory for as many threads as were set then. The threads sleep between
    calls and live as long as the process; a forked child starts its own.
    """
    _native.set_threads(count)


if _wanted := os.environ.get("EDGEVLM_SIMD"):
    use_simd(_wanted)


def cuda_twin(held: Any) -> Any:
    """What has the same functions for rows that lie on a device, if ``held``, a cache or its view, is there; else None."""
    return getattr(held, "kernels", None)


def temporal_similarity(
    key: NDArray[np.number],  # [H, n, D], as stored, rotated
    position: NDArray[np.int32],  # [H, n, axes]
    row: NDArray[np.int16],  # [H, n]
    col: NDArray[np.int16],  # [H, n]
    recent: NDArray[np.bool_],  # [H, n]
    valid: NDArray[np.bool_],  # [H, n]
    inv_freq: NDArray[np.float64],  # [D / 2]
    *,
    rotated: bool = False,
    pair_axis: NDArray[np.uint8] | None = None,  # [D / 2]
    scale: NDArray[np.float32] | None = None,  # [H, D]
) -> NDArray[np.float32]:
    """InfiniPot-V eq. 4 before its sign: the mean cosine of each past key with the recent keys of its own patch.

    Per head, over the recent tokens with the same (row, col), on un-rotated keys (``rotated``: as stored). pair_axis: the
    position axis that each rotary pair turns by, needed with 3 axes. Returns float32 ``[H, n]``: -1 where a patch has no
    recent token, so that the negated score is +1; 0 for rows that are recent or not ``valid``. A zero vector has cosine 0
    with everything. O(n D), each key read once.
    """
    return _native.temporal_similarity(key, position, row, col, recent, valid, inv_freq, pair_axis, rotated, scale)


def attention_mass(
    query: NDArray[np.float32],  # [heads, w, D], rotated
    query_seq: NDArray[np.int64],  # [w]
    key: NDArray[np.number],  # [H, n, D], rotated
    seq: NDArray[np.int64],  # [H, n]
    own_key: NDArray[np.float32] | None = None,  # [H, m, D], rotated
    own_seq: NDArray[np.int64] | None = None,  # [m]
    scale: NDArray[np.float32] | None = None,  # [H, D]
) -> NDArray[np.float32]:
    """How much attention each cached token gets from w rows: float32 ``[H, n]``.

    ``softmax(q K^T / sqrt(D))``, where a row at stream place ``query_seq`` sees the tokens whose ``seq`` is not above its own,
    summed over the w rows and over the query heads of each KV head's group. A row that sees nothing adds nothing. own_key:
    keys outside the cache that the rows see as well, by ``own_seq``; what attention they get is not returned. Scores take 32
    numbers a key at a time.
    """
    if twin := cuda_twin(key):
        return twin.attention_mass(query, query_seq, key, seq, own_key, own_seq)
    return _native.attention_mass(query, query_seq, key, seq, own_key, own_seq, scale)


def infinipot_scores(
    cache: KVCache, recent: Sequence[NDArray[np.bool_]], valid: Sequence[NDArray[np.bool_]], *, rotated: bool = False
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """:func:`temporal_similarity` and :func:`value_norms` of every layer of a cache, in one call that all threads share.

    recent, valid: bool ``[H, n_l]``, one a layer. Returns ``(similarity, norms)``, float32 ``[H, n_l]``, one pair a layer.
    """
    if twin := cuda_twin(cache):
        return twin.infinipot_scores(cache, recent, valid, rotated)
    return _native.infinipot_scores(cache.native, list(recent), list(valid), rotated)


def infinipot_select(
    cache: KVCache,
    recent_frames: int,
    distinctive: int,
    target: int,
    windows: Sequence[int],
    thresholds: Sequence[float] = (),
    *,
    keep_recent: bool = True,
    rotated: bool = False,
) -> list[NDArray[np.bool_]]:
    """InfiniPot-V, Alg. 1, of every layer, each KV head by itself: rows to keep, bool ``[H, n_l]``, one mask a layer.

    The prefix stays, and of the vision rows the ``recent_frames`` newest frames (with ``keep_recent``), ``distinctive`` past
    rows by TaR (:func:`temporal_similarity`, the least alike first), and by VaN (:func:`pool_norms`) as many of the others as
    make it ``target``. windows: VaN's, one a layer; with 3 rising ``thresholds`` the window is 7, 5, 3 or 1 by the coefficient
    of variation of the layer's value norms (Alg. 2, lines 16 to 21). The same as those functions and :func:`top_k` one after
    another, in one call that all threads share, a layer at a time; keys are read once, and values once in their life: the cache
    keeps their norms.
    """
    how = (recent_frames, distinctive, target, list(windows), list(thresholds), keep_recent, rotated)
    if twin := cuda_twin(cache):
        return twin.infinipot_select(cache, *how)
    return _native.infinipot_select(cache.native, *how)


def newer_similarity(
    cache: KVCache, layer: int, valid: NDArray[np.bool_], since: int = 0, *, rotated: bool = False
) -> NDArray[np.float32]:
    """How alike each token of a layer is to the newer token that it is most like: float32 ``[H, n_l]``.

    Per head the highest cosine of its key with that of a token of larger ``seq``, ``since`` or later, both among ``valid``
    ``[H, n_l]``; -1 where there is none, 0 for rows that are not ``valid``. On un-rotated keys (``rotated``: as stored). A zero
    vector has cosine 0 with everything. O(n m D) for m tokens from ``since`` on. Raises CacheError for a layer that is not
    there, and for keys on 3 axes that the cache does not know how to un-rotate.
    """
    if twin := cuda_twin(cache):
        return twin.newer_similarity(cache, layer, valid, since, rotated)
    return _native.newer_similarity(cache.native, layer, valid, since, rotated)


def newest_frames(frame: NDArray[np.int32], among: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """Rows of ``among`` that lie in one of its ``count`` newest frames, taken over all heads: bool ``[H, n]``."""
    return _native.newest_frames(frame, among, count)


def index_of(seq: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.int32]:
    """Per head, where each token of ``seq`` ``[H, n]`` stands in ``known`` ``[H, m]``: int32 ``[H, n]``, -1 where it does not.

    Both in any order; of equal ones in ``known`` the first. O(n + m).
    """
    return _native.index_of(seq, known)


def join(
    seq: NDArray[np.int64],  # [H, n]
    known: NDArray[np.int64],  # [H, m]
    score: NDArray[np.float32],  # [H, m]
    into: NDArray[np.float32],  # [H, n]
) -> None:
    """Per head write the score of each token of ``seq`` that is among ``known`` to its place in ``into``; others stay."""
    _native.join(seq, known, score, into)


def value_norms(value: NDArray[np.number], scale: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """L2 norms ``[H, n]`` of values ``[H, n, D]``, whatever their size: InfiniPot-V's VaN. scale: ``[H, D]``, of int8."""
    if twin := cuda_twin(value):
        return twin.value_norms(value)
    return _native.value_norms(value, scale)


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
    ``valid``. Sums are in double. O(n window) on frames of up to some 60 x 60 patches.
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


def levels(
    pixels: NDArray[np.float32],  # [planes, H, W]
    scale: NDArray[np.float32],  # [planes]
    offset: NDArray[np.float32],  # [planes]
) -> NDArray[np.uint8]:
    """``pixels * scale + offset`` by plane, to nearest, 0 to 255: uint8 ``[planes, H, W]``."""
    return _native.levels(pixels, scale, offset)


def patch_sums(levels: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.float32]:
    """Of uint8 ``[planes, H, W]`` the sum of each patch: float32 ``[rows * columns]``."""
    return _native.patch_sums(levels, rows, columns)


def patch_distances(
    levels: NDArray[np.uint8],  # [planes, H, W]
    low: NDArray[np.uint8],  # [planes, H, W]
    high: NDArray[np.uint8],  # [planes, H, W]
    rows: int,
    columns: int,
    gain: NDArray[np.float32] | None = None,  # [rows * columns]
) -> NDArray[np.float32]:
    """How far each patch's levels lie outside ``[low, high]``, the mean of the largest tenth: float32 ``[rows * columns]``.

    A patch is ``H // rows`` by ``W // columns`` pixels of all planes; what is left at the right and below belongs to none.
    gain: of each patch, what ``low`` and ``high`` are multiplied by first, in steps of 1/256.
    """
    return _native.patch_distances(levels, low, high, gain, rows, columns)
