"""The nearest newer token against its float64 twin."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import KVCache, Rows
from edgevlm.runtime.kv import KVScales

pytestmark = pytest.mark.usefixtures("isa")


def filled(rng, n, dim, dtype, axes, heads=2, scale=1.0, most=5000):
    """One layer of n tokens, evicted from a larger one so that heads hold other tokens and rows are in no order."""
    sections = None if axes == 1 else (dim // 2 - 2 * (dim // 6), dim // 6, dim // 6)
    inv_freq = 1 / 1e4 ** (np.arange(0, dim, 2) / dim)
    scales = None
    if dtype == "int8":
        scales = KVScales.holding(scale * rng.uniform(3, 9, (1, heads, dim // 2)), np.ones((1, heads, dim)))
    cache = KVCache(1, heads, dim, n + 40, inv_freq=inv_freq, axes=axes, dtype=dtype, sections=sections, scales=scales)
    count = n + 30
    none = np.zeros(count, np.int16)
    seq = np.cumsum(rng.integers(1, 5, count))
    position = rng.integers(0, most, (count, axes), dtype=np.int32)
    key = (scale * rng.standard_normal((heads, count, dim))).astype(np.float32)
    key[rng.random((heads, count)) < 0.1] = 0
    cache.append(0, key, key, Rows(none.astype(np.uint8) + 1, seq, none.astype(np.int32), none, none, position))
    keep = np.zeros((heads, count), np.bool_)
    for head in keep:
        head[rng.permutation(count)[:n]] = True
    cache.evict([keep])
    return cache


def expected(cache, valid, since, rotated=False):
    arrays = cache.dequantize("key", 0), cache.position(0), cache.seq(0), valid, cache.inv_freq, since
    return reference.newer_similarity(*arrays, rotated=rotated, pair_axis=cache.pair_axis)


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_newer_similarity_equals_the_reference(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, dim = data.draw(st.sampled_from([0, 1, 2, 31, 33, 65, 130])), data.draw(st.sampled_from([2, 6, 8, 72]))
    dtype, axes = data.draw(st.sampled_from(["fp32", "fp16", "int8"])), data.draw(st.sampled_from([1, 3]))
    scale = data.draw(st.sampled_from([1, 1e-6, 1e3] if dtype == "fp16" else [1, 1e-30, 1e18]))
    most = data.draw(st.sampled_from([1, 64, 5000, 2**31 - 1]))
    cache = filled(rng, n, dim, dtype, axes, scale=scale, most=most)
    valid = rng.random((2, n)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    rotated, since = data.draw(st.booleans()), data.draw(st.sampled_from([0, 100, 10**6]))
    found = kernels.newer_similarity(cache, 0, valid, since, rotated=rotated)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(cache, valid, since, rotated), atol=2e-5, rtol=0)


def test_more_tokens_than_a_batch(isa):
    """Batches of 1,024 tokens and blocks of 64 keys meet each pair once, whichever of them it lies across."""
    rng = np.random.default_rng(0)
    cache = filled(rng, 2600, 8, "fp32", 1, heads=1)
    valid, seq = np.ones((1, 2600), np.bool_), cache.seq(0)[0]
    keys = reference.rotate(cache.key(0), -cache.position(0)[..., 0], cache.inv_freq)[0]
    length = np.linalg.norm(keys, axis=1, keepdims=True)
    unit = np.divide(keys, length, out=np.zeros_like(keys), where=length > 0)
    cosine = np.where(seq[None] > seq[:, None], unit @ unit.T, -1)
    np.testing.assert_allclose(kernels.newer_similarity(cache, 0, valid)[0], cosine.max(1), atol=1e-5)
    for since in (int(seq.min()) + 1, int(np.sort(seq)[1500]), int(seq.max())):
        later = np.where(seq >= since, cosine, -1).max(1)
        np.testing.assert_allclose(kernels.newer_similarity(cache, 0, valid, since)[0], later, atol=1e-5)


@pytest.mark.parametrize("noise", [0, 1e-4, 1e-2])
@pytest.mark.parametrize("dim", [6, 128])
def test_tokens_that_all_look_alike(noise, dim):
    """What rounds away most of the differences between tokens does not decide which are the most alike."""
    rng = np.random.default_rng(0)
    n = 200
    cache = KVCache(1, 1, dim, n, inv_freq=np.ones(dim // 2))
    scene = rng.standard_normal((3, dim))[rng.integers(0, 3, n)]
    key = (scene + noise * rng.standard_normal((n, dim))).astype(np.float32)[None]
    none = np.zeros(n, np.int16)
    position = np.zeros((n, 1), np.int32)
    cache.append(0, key, key, Rows(none.astype(np.uint8) + 1, np.arange(n), none.astype(np.int32), none, none, position))
    valid = np.ones((1, n), np.bool_)
    found = kernels.newer_similarity(cache, 0, valid)
    np.testing.assert_allclose(found, expected(cache, valid, 0), atol=1e-6, rtol=0)
