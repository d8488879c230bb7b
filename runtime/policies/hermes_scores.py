"""What HERMES is made of: scores of one layer (eqs. 1 to 4), smoothing across layers (eq. 5), the summary token (App. G)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Rows
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Bool, Float32, NewRows

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


def normalised(score: Float64, added: float = 0.0) -> Float64:
    """Min-max over one layer's tokens, ``added`` to the range; 0 where all are equal or one is not a number."""
    low, high = score.min(initial=np.inf), score.max(initial=-np.inf)
    return (score - low) / (high - low + added) if high > low else np.zeros_like(score)


def recency(order: Int64, k: float) -> Float64:
    """Eq. 1: ``exp(-k dt)``, dt the rank from the newest as a share of the largest rank; order: larger is newer, ``[n]``."""
    age = np.empty(len(order))
    age[np.argsort(order)] = np.arange(len(order))[::-1]
    return np.exp(-k * age / max(len(order) - 1, 1))


def guidance_attention(
    queries: Float32,
    own_keys: Float32,
    key: NDArray[np.number],
    seq: Int64,
    scale: Float32 | None = None,
    *,
    causal: bool = True,
) -> Float64:
    """Eq. 2: the attention weight of each row of a layer, averaged over heads and guidance rows, ``[n]``.

    queries: ``[heads, rows, head_dim]``; own_keys: ``[kv_heads, rows, head_dim]``, which a guidance row sees up to its own, or
    all of them unless ``causal``; key: ``[kv_heads, n, head_dim]`` as stored, seq: ``[kv_heads, n]``; scale: of int8 keys.
    """
    heads, rows, _ = queries.shape
    places = seq.max(initial=-1) + 1 + np.arange(rows) * causal
    mass = kernels.attention_mass(queries, places, key, seq, own_keys, places, scale)
    return mass.sum(0, dtype=np.float64) / (heads * rows)


def smoothed(scores: Sequence[Float64], orders: Sequence[Int64], weights: Sequence[float], by_rank: bool) -> list[Float64]:
    """Eq. 5 from the deepest layer up: each layer takes its weight's share from the smoothed layer above it.

    Tokens meet by ``orders`` (their seq); one that the layer above does not hold stays as it is. ``by_rank``: the n-th token
    meets the n-th, and layers of unequal length by linear interpolation, as the authors' program does.
    """
    done = list(scores)
    for layer in range(len(scores) - 2, -1, -1):
        own, above, weight = scores[layer].copy(), done[layer + 1], weights[layer]
        if by_rank and len(above):
            here, there = np.argsort(orders[layer]), np.argsort(orders[layer + 1])
            place = (np.arange(len(own)) + 0.5) * len(above) / max(len(own), 1) - 0.5
            own[here] = (1 - weight) * own[here] + weight * np.interp(place, np.arange(len(above)), above[there])
        elif not by_rank:
            place = kernels.index_of(orders[layer][None], orders[layer + 1][None])[0]
            here, there = place >= 0, place[place >= 0]
            own[here] = (1 - weight) * own[here] + weight * above[there]
        done[layer] = own
    return done


def summary_of(cache: KVCache, layer: int, gone: Bool, weight: Float64, position: int | None = None) -> NewRows:
    """One row that stands for the rows ``gone`` ``[n]`` of a layer whose heads hold the same tokens, by ``weight`` ``[n]``.

    It takes the place of the newest of them in the stream: key = weighted mean of their keys rotated to its position on every
    axis (or to ``position`` on all of them), value = weighted mean of their values (App. G; eqs. 10 and 13). Raises CacheError
    for a cache that does not say which axis a rotary pair turns by.
    """
    if cache.axes > 1 and cache.pair_axis is None:
        raise CacheError(f"a summary turns keys, and this cache of {cache.axes} position axes has no sections: use summary=off")
    seq, at = cache.seq(layer)[0], cache.position(layer)[0].astype(np.int64)
    newest = int(np.argmax(np.where(gone, seq, -1)))
    target = at[newest] if position is None else np.full(cache.axes, position)
    share = weight[gone] / weight[gone].sum()
    pair_axis = np.zeros(len(cache.inv_freq), np.uint8) if cache.pair_axis is None else cache.pair_axis
    angle = (target - at[gone])[:, pair_axis] * cache.inv_freq
    first, second = np.split(cache.numbers("key", layer, gone).astype(np.float64), 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    aligned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    rows = Rows(
        kind=np.array([Kind.SUMMARY], np.uint8),
        seq=seq[[newest]].astype(np.int64),
        frame=np.array([-1], np.int32),
        row=np.zeros(1, np.int16),
        col=np.zeros(1, np.int16),
        position=target[None].astype(np.int32),
    )
    value = cache.numbers("value", layer, gone).astype(np.float64)
    mean = [np.einsum("n,hnd->hd", share, part)[:, None].astype(np.float32) for part in (aligned, value)]
    return NewRows(mean[0], mean[1], rows)
