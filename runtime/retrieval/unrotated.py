"""Keys and queries as they were before their rotary embedding: what is compared across positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.retrieval.working import turn
from edgevlm.runtime.store import Block

Float32 = NDArray[np.float32]


def unrotated_keys(cache: KVCache, layer: int, block: Block) -> Float32:
    """Keys of a block of all KV heads of a layer, float32 ``[kv_heads, n, head_dim]``."""
    key, scale = block.key.astype(np.float32), cache.key_scale(layer)
    if scale is not None:
        key *= scale[:, None]
    flat = turn(key.reshape(-1, cache.head_dim), -block.position.reshape(-1, cache.axes), cache.inv_freq, cache.pair_axis)
    return flat.reshape(key.shape)


def unrotated_queries(query: Float32, cos: Float32, sin: Float32) -> Float32:
    """Queries ``[heads, S, head_dim]`` that were rotated with ``cos`` and ``sin`` ``[S, head_dim / 2]``: turned back."""
    low, high = np.split(query, 2, -1)
    return np.concatenate([low * cos + high * sin, high * cos - low * sin], -1)


def per_kv_head(query: Float32, kv_heads: int) -> Float32:
    """The mean over a call's rows, summed over the query heads of each KV head: ``[kv_heads, head_dim]``.

    Its dot product with a key is the sum over the group's heads and the mean over rows of q . k.
    """
    heads, _, width = query.shape
    mean: Float32 = query.mean(1).reshape(kv_heads, heads // kv_heads, width).sum(1)
    return mean
