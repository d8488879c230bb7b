"""Which clusters a query asks for: partitions first, then the clusters inside (Mosaic, sec. V-C)."""

from __future__ import annotations

import numpy as np

from edgevlm.runtime.retrieval.cohesion import Float32
from edgevlm.runtime.retrieval.table import NONE, Int64, Table


def share_of_attention(query: Float32, key: Float32) -> Float32:
    """What representatives ``key`` ``[k, D]`` get of the attention of rows ``query`` ``[r, D]``, float32 ``[k]``.

    softmax(q K^T / sqrt(D)), over the representatives alone, and the mean over the rows.
    """
    score = query @ key.T / np.float32(np.sqrt(key.shape[1]))
    score = np.exp(score - score.max(1, keepdims=True))
    of_rows: Float32 = (score / score.sum(1, keepdims=True)).mean(0)
    return of_rows


def choose_clusters(table: Table, layer: int, head: int, query: Float32, partitions: int, room: int) -> Int64:
    """Slots, best first, until they hold ``room`` rows below; query: un-rotated rows ``[r, D]`` of all of a KV head's group.

    A partition's representative is the mean key of its rows, since a query has no picture to compare. partitions: how many
    are looked into. Clusters of one row are left out: their representative is that row. Of equal ones the newer is the better.
    """
    where = table.partition[layer, head]
    live = np.flatnonzero(where != NONE)
    if not len(live):
        return live
    key = table.key[layer, head, live]
    inside = np.isin(where[live], _partitions(table, layer, head, live, query, partitions))
    score = np.where(inside & (table.size[layer, head, live] > 1), share_of_attention(query, key), -1.0)
    order = np.lexsort((-table.seq[layer, head, live], -score))
    order = order[: int((score >= 0).sum())]
    before = np.cumsum(table.rows[layer, head, live[order]]) - table.rows[layer, head, live[order]]
    return live[order[before < room]]


def _partitions(table: Table, layer: int, head: int, live: Int64, query: Float32, count: int) -> Int64:
    """The ``count`` partitions whose mean key gets the most attention; of equal ones the lower number."""
    labels, of = np.unique(table.partition[layer, head, live], return_inverse=True)
    if len(labels) <= count:
        return labels
    weight = np.where(of[None] == np.arange(len(labels))[:, None], table.size[layer, head, live], 0).astype(np.float32)
    mean = weight / weight.sum(1, keepdims=True) @ table.key[layer, head, live]
    return labels[np.argsort(-share_of_attention(query, mean), kind="stable")[:count]]
