"""Attention mass from probed queries: what the attention-scored policies rank tokens by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


def attention_mass(query: Float32, query_seq: Int64, key: Float32, seq: Int64) -> Float32:
    """How much attention each cached token gets: float32 ``[kv_heads, n]``.

    query: rotated, ``[heads, w, head_dim]``, at stream places ``query_seq`` ``[w]``; key: rotated, ``[kv_heads, n, head_dim]``,
    at ``seq`` ``[kv_heads, n]``. A row sees the tokens whose seq is not above its own. The mass is
    ``softmax(q K^T / sqrt(D))`` summed over the w rows and over the query heads of each group.
    """
    heads, rows, width = query.shape
    kv_heads = len(key)
    grouped = query.reshape(kv_heads, heads // kv_heads * rows, width) * np.float32(width**-0.5)
    scores = np.matmul(grouped, key.transpose(0, 2, 1))  # [kv_heads, group * rows, n]
    unseen = seq[:, None, :] > np.tile(query_seq, heads // kv_heads)[None, :, None]
    scores[unseen] = -np.inf
    scores -= scores.max(2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(2, keepdims=True)
    return scores.sum(1, dtype=np.float32)
