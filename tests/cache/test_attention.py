"""Attention mass against its float64 twin."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevlm.runtime import kernels
from edgevlm.runtime.kv import codes

pytestmark = pytest.mark.usefixtures("isa")


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_attention_mass_equals_the_reference(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 7), (1, 3)]))
    rows, n = data.draw(st.sampled_from([0, 1, 5, 32, 33])), data.draw(st.sampled_from([1, 2, 63, 64, 65, 200]))
    width = data.draw(st.sampled_from([1, 2, 8, 33, 64]))
    loud = data.draw(st.sampled_from([0, 1, 30]))  # all alike; ordinary; all mass on one token
    query = (loud * rng.standard_normal((kv_heads * group, rows, width))).astype(np.float32)
    numbers, dtype = (
        rng.standard_normal((kv_heads, n + 3, width)),
        data.draw(st.sampled_from([np.float32, np.float16, np.int8])),
    )
    scale = rng.uniform(0.02, 0.05, (kv_heads, width)).astype(np.float32) if dtype == np.int8 else None
    key = (numbers.astype(dtype) if scale is None else codes(numbers, scale))[:, :n]
    seq = np.stack([rng.permutation(2 * n)[:n] for _ in range(kv_heads)]).astype(np.int64)
    seq[:, 0] = 0  # one that every row sees
    query_seq = np.sort(rng.integers(0, 2 * n, rows)).astype(np.int64)
    found = kernels.attention_mass(query, query_seq, key, seq, scale=scale)
    expected = reference.attention_mass(query, query_seq, key if scale is None else key * scale[:, None].astype(float), seq)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(found.sum(), kv_heads * group * rows, rtol=1e-5)
    assert (found[seq > query_seq.max(initial=-1)] == 0).all()


@pytest.mark.parametrize("m", [0, 1, 33, 130])
@pytest.mark.parametrize("n", [1, 70])
def test_keys_of_the_rows_themselves_are_seen_too(n, m):
    """Own keys take their share of the attention, just as if they lay in the cache, and are not returned."""
    rng = np.random.default_rng(m)
    query = 3 * rng.standard_normal((4, max(m, 1), 16), np.float32)
    key, own = rng.standard_normal((2, n, 16), np.float32), rng.standard_normal((2, m, 16), np.float32)
    seq, own_seq = np.tile(np.arange(n), (2, 1)), n + np.arange(m)
    query_seq = n + np.arange(max(m, 1))
    found = kernels.attention_mass(query, query_seq, key, seq, own, own_seq)
    both = np.concatenate([key, own], 1), np.concatenate([seq, np.tile(own_seq, (2, 1))], 1)
    expected = reference.attention_mass(query, query_seq, *both)[:, :n]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("last", [-200.0, 0.0, 200.0])
def test_scores_that_rise_or_fall_over_the_blocks_of_keys(last):
    """The highest score may be the first or the last, far above the others; none of them overflows."""
    key = np.zeros((1, 300, 4), np.float32)
    key[0, :, 0] = np.linspace(-200, 200, 300) if last else 0
    key[0, -1, 0] = last
    query, query_seq, seq = np.full((1, 2, 4), 2, np.float32), np.array([500, 150]), np.arange(300)[None]
    found = kernels.attention_mass(query, query_seq, key, seq)
    np.testing.assert_allclose(found, reference.attention_mass(query, query_seq, key, seq), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 63, 131, 200])
def test_equal_scores_have_equal_mass(n):
    """To the bit, in whatever block a key lies: policies break ties by age."""
    query = np.random.default_rng(n).standard_normal((3, 9, 8), np.float32)
    key = np.broadcast_to(np.random.default_rng(1).standard_normal(8).astype(np.float32), (1, n, 8))
    found = kernels.attention_mass(query, np.full(9, n), np.ascontiguousarray(key), np.arange(n)[None])
    assert len(np.unique(found)) == 1


def test_a_row_that_sees_nothing_adds_nothing():
    query, key = np.ones((1, 2, 4), np.float32), np.ones((1, 3, 4), np.float32)
    seq, query_seq = np.array([[5, 6, 7]]), np.array([4, 5])
    assert kernels.attention_mass(query, query_seq, key, seq).tolist() == [[1, 0, 0]]
    assert kernels.attention_mass(query, query_seq, key[:, :0], seq[:, :0]).shape == (1, 0)
