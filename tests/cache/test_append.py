"""Reserve, write in place, commit or abort; mark and roll back; evict; take a layer's rows out and put them back."""

import numpy as np
import pytest

from edgevlm.errors import CacheError, CacheFull
from edgevlm.runtime.cache import PARTS


def test_an_aborted_append_leaves_no_trace(kit):
    cache = kit.make()
    kit.append(cache, 6)
    cache.evict([kit.random_keep(np.random.default_rng(1), 2, 6, 3)] * 2)
    before = [kit.arrays(cache, layer) for layer in range(2)]
    cache.reserve(9)
    kit.write(cache, 9, np.random.default_rng(2))
    cache.abort()
    assert cache.lengths.tolist() == [3, 3]
    for layer, buffer in enumerate(cache.buffers()):
        for name, array in kit.arrays(cache, layer).items():
            np.testing.assert_array_equal(array, before[layer][name])
        assert not any(array[:, 3:12].any() for array in kit.memory(buffer)), "an engine that failed may have left a NaN"


def test_a_full_layer_says_so_and_nothing_is_reserved(kit):
    cache = kit.make(capacity=[40, 16])
    kit.append(cache, 12)
    with pytest.raises(CacheFull, match="layer 1 holds 12 of 16 rows and cannot take 5 more: evict at least 1"):
        cache.reserve(5)
    cache.reserve(4)
    cache.abort()
    with pytest.raises(CacheFull):
        cache.reserve(2**62)


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


MROPE = {1: {}, 3: {"axes": 3, "sections": (2, 1, 1)}}


def compressed(kit, axes=1):
    """A cache whose heads hold different tokens in different orders."""
    cache, random = kit.make(capacity=40, **MROPE[axes]), np.random.default_rng(1)
    kit.append(cache, 36)
    cache.evict([kit.random_keep(random, 2, 36, 17 + layer) for layer in range(2)])
    cache.reindex(0)
    return cache


def all_of(kit, cache):
    return [kit.arrays(cache, layer) for layer in range(cache.layers)]


@pytest.mark.parametrize("axes", [1, 3])
def test_a_layer_comes_back_to_the_bit_and_behaves_alike(kit, axes):
    one, other = compressed(kit, axes), kit.make(capacity=25, **MROPE[axes])
    kit.append(other, 25, start=90)
    for layer, held in enumerate(all_of(kit, one)):
        other.load(layer, held)
    assert other.lengths.tolist() == one.lengths.tolist() == [17, 18]
    thinned = np.arange(17)[None] % 3 != np.array([[0], [1]])
    thinned[1, 0] = False
    for cache in (one, other):
        cache.evict([np.repeat(thinned[:1], 2, 0), None])
        cache.shift(1, cache.position(1) + 2)
        cache.reindex(3)
        kit.append(cache, 4, start=200)
    for mine, theirs in zip(all_of(kit, one), all_of(kit, other), strict=True):
        for name in PARTS:
            np.testing.assert_array_equal(mine[name], theirs[name], name)


def test_rows_that_do_not_fit_and_layers_that_are_none(kit):
    one, small = compressed(kit), kit.make(capacity=10)
    held = kit.arrays(one, 0)
    with pytest.raises(CacheFull, match="has room for 10 rows and cannot hold 17"):
        small.load(0, held)
    with pytest.raises(CacheError, match="there is no layer 2"):
        one.load(2, held)
    one.reserve(1)
    with pytest.raises(CacheError, match="cannot load"):
        one.load(0, held)
