"""Queries that policies keep, through evictions and re-indexings."""

import numpy as np
import pytest
from policies.filled import DIM, GROUP, HEADS, STORAGE, Filled

from edgevlm.runtime.policies import Layer
from edgevlm.runtime.policies.attention import QueryWindow
from edgevlm.runtime.stateful import bytes_of


def held_at(filled, layer, head, seq):
    """The positions that a head has the rows of ``seq`` at: ``[w]``, or ``[w, 3]``."""
    place = {token["seq"]: token["position"] for token in filled.heads(layer)[head]}
    return np.array([place[s] for s in seq.tolist()])


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_query_window_follows_its_rows_through_a_reindexing(dtype, axes):
    """Untouched as long as its rows are where they were; afterwards rotated head by head, each by what its row moved."""
    filled = Filled(2, 60, (2, 3), np.random.default_rng(0), dtype, axes)
    window = QueryWindow(8)
    for _ in range(4):
        window.add(filled.frame())
    for layer in range(2):
        query, seq = window.at(Layer(filled.cache, layer))
        assert seq.tolist() == list(range(filled.seq - 8, filled.seq))
        bare = np.stack([filled.bare[layer][s] for s in seq.tolist()], 1)
        np.testing.assert_array_equal(query, filled.rotated(bare, held_at(filled, layer, 0, seq)).astype(np.float32))
    keep = [np.ones((HEADS, int(n)), bool) for n in filled.cache.lengths]
    keep[0][0, [4, 6, 7]] = keep[0][1, [12, 13, 14]] = False
    keep[0][0, 9:15] = keep[0][1, 15:21] = False  # a frame, so that the axis of frames closes up too
    filled.cache.evict(keep)
    filled.reindex()
    window.add(filled.frame())
    moves = np.array([[0, 0, 0], [5, 2, 9]], np.int32)[:, None, :axes]  # of each head, one an axis
    filled.cache.shift(1, filled.cache.position(1) + moves)
    for layer in range(2):
        query, seq = window.at(Layer(filled.cache, layer))
        bare = np.stack([filled.bare[layer][s] for s in seq.tolist()], 1)  # [query heads, w, DIM]
        for head in range(HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)
            there = filled.rotated(bare[group], held_at(filled, layer, head, seq))
            np.testing.assert_allclose(query[group], there, atol=1e-6)
    assert all(queries.shape == (HEADS * GROUP, 8, DIM) for queries in window._queries.values())
    assert bytes_of(window) == 8 * (8 + 4 * axes + 2 * HEADS * GROUP * DIM * 4)
