"""Holes are filled from the tail: nothing is lost, nothing moves that need not."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevlm.errors import CacheError


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_evict_equals_the_reference(kit, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    heads, axes = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 3]))
    cache = kit.make(layers=3, kv_heads=heads, capacity=[20, 24, 28], axes=axes)
    n = data.draw(st.integers(0, 20))
    kit.append(cache, n, rng=rng)
    for _ in range(data.draw(st.integers(1, 3))):
        keep = []
        for length in cache.lengths:
            kept = data.draw(st.integers(0, int(length)))
            keep.append(None if data.draw(st.booleans()) else kit.random_keep(rng, heads, int(length), kept))
        before = [kit.arrays(cache, layer) for layer in range(3)]
        held, moved = cache.lengths, cache.rows_moved
        evicted = cache.evict(keep)
        assert evicted == (held - cache.lengths).sum()
        assert cache.rows_moved - moved <= evicted * heads
        for layer in range(3):
            after = kit.arrays(cache, layer)
            if keep[layer] is None:
                expected = list(before[layer].values())
            else:
                expected = reference.evict(list(before[layer].values()), keep[layer])
            for array, wanted in zip(after.values(), expected, strict=True):
                np.testing.assert_array_equal(array, wanted)
            assert all(np.isfinite(array).all() for array in kit.memory(cache.buffers()[layer])), "free rows too"


def test_heads_may_keep_different_rows_but_not_different_counts(kit):
    cache = kit.make(layers=2)
    kit.append(cache, 4)
    before = cache.memory.copy()
    good = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], np.bool_)
    bad = np.array([[1, 0, 1, 0], [0, 1, 1, 1]], np.bool_)
    with pytest.raises(CacheError, match="in layer 1 head 0 keeps 2 and head 1 keeps 3"):
        cache.evict([good, bad])
    np.testing.assert_array_equal(cache.memory, before)  # layer 0 too
    cache.evict([good, ~good])
    assert np.sort(cache.seq(0)).tolist() == [[0, 2], [1, 3]]
    assert np.sort(cache.seq(1)).tolist() == [[1, 3], [0, 2]]


def test_masks_may_be_strided_and_evict_everything(kit):
    cache = kit.make(layers=1)
    kit.append(cache, 5)
    wide = np.zeros((5, 4), np.bool_)
    wide[1, ::2] = True
    cache.evict([wide[:, ::2].T])
    assert cache.seq(0).tolist() == [[1], [1]]
    cache.evict([np.zeros((2, 1), np.bool_)])
    assert cache.lengths.tolist() == [0]
    kit.append(cache, 32, start=7)
    assert cache.seq(0)[0].tolist() == list(range(7, 39))
