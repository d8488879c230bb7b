"""A layer's rows taken out and put back: the same bytes in the same order, and misuse changes nothing."""

import numpy as np
import pytest

from edgevlm.errors import CacheError, CacheFull
from edgevlm.runtime.cache import PARTS

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
