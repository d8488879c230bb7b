"""Each kernel against its float64 reference: the shapes, sizes of numbers and ties that a stream seldom has."""

import numpy as np
import pytest
import reference
from cuda_backend import DEVICES, backend

from edgevlm.errors import UserError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind

WIDTHS = [2, 6, 16, 20, 80, 128, 272]  # in pieces of one number and of 16 bytes; one lane a row, all 32, and more than once
DTYPES = {"fp32": np.float32, "fp16": np.float16}


@pytest.fixture(scope="module", params=DEVICES)
def make(request):
    return backend(request.param)


def held(random, n, width, dtype="fp32", axes=1, heads=2, frames=5, side=3, **columns):
    """What a layer holds: noise, in patches of a small grid, as :meth:`KVCache.load` takes it."""
    seq = np.stack([random.permutation(3 * n)[:n] for _ in range(heads)]).astype(np.int64)
    cell = random.integers(0, side * side, (heads, n))
    rows = {
        "key": random.standard_normal((heads, n, width)).astype(DTYPES[dtype]),
        "value": random.standard_normal((heads, n, width)).astype(DTYPES[dtype]),
        "kind": np.full((heads, n), Kind.VISION, np.uint8),
        "seq": seq,
        "frame": random.integers(0, frames, (heads, n)).astype(np.int32),
        "row": (cell // side).astype(np.int16),
        "col": (cell % side).astype(np.int16),
        "position": random.integers(0, 1 << 20, (heads, n, axes)).astype(np.int32),
    }
    return {"confirmed": rows["frame"], **rows, **columns}


def cache_of(make, rows, sections=None):
    heads, n, width = rows["key"].shape
    dtype, axes = "fp16" if rows["key"].dtype == np.float16 else "fp32", rows["position"].shape[2]
    inv_freq = 1 / 1e4 ** (np.arange(0, width, 2) / width)
    cache = make(1, heads, width, n + 7, inv_freq=inv_freq, axes=axes, dtype=dtype, sections=sections)
    cache.load(0, rows)
    return cache


def cosines(cache, rows, recent, valid, rotated=False):
    arguments = (rows["key"], rows["position"], rows["row"], rows["col"], recent, valid, cache.inv_freq)
    return reference.temporal_similarity(*arguments, rotated=rotated, pair_axis=cache.pair_axis)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1e18, 1e30])
def test_numbers_whose_squares_float32_cannot_hold(make, scale):
    random = np.random.default_rng(1)
    rows = held(random, 40, 16)
    for part in ("key", "value"):
        rows[part][:, ::3] *= np.float32(scale)
    cache = cache_of(make, rows)
    valid, recent = np.ones((2, 40), bool), random.random((2, 40)) < 0.4
    [(similarity, norms)] = kernels.infinipot_scores(cache, [recent], [valid])
    np.testing.assert_allclose(similarity, cosines(cache, rows, recent, valid), atol=3e-6)
    np.testing.assert_allclose(norms, reference.value_norms(rows["value"]), rtol=1e-6)


def test_patches_at_the_ends_of_the_grid_and_all_in_one(make):
    random = np.random.default_rng(2)
    ends = np.array([-32768, -1, 0, 32767], np.int16)
    for row, col in (
        (ends[random.integers(0, 4, (2, 300))], ends[random.integers(0, 4, (2, 300))]),
        [np.ones((2, 300), np.int16)] * 2,
    ):
        rows = held(random, 300, 8, row=row, col=col)
        cache = cache_of(make, rows)
        valid, recent = random.random((2, 300)) < 0.9, random.random((2, 300)) < 0.5
        [(similarity, _)] = kernels.infinipot_scores(cache, [recent], [valid])
        np.testing.assert_allclose(similarity, cosines(cache, rows, recent, valid), atol=3e-6)


def test_scores_come_out_the_same_bits_in_any_order_of_rows(make):
    """No sum depends on who comes first."""
    random = np.random.default_rng(3)
    rows = held(random, 200, 16)
    valid, recent, order = np.ones((2, 200), bool), random.random((2, 200)) < 0.6, random.permutation(200)
    shuffled = {name: np.ascontiguousarray(array[:, order]) for name, array in rows.items()}
    [(one, _)] = kernels.infinipot_scores(cache_of(make, rows), [recent], [valid])
    [(other, _)] = kernels.infinipot_scores(cache_of(make, shuffled), [recent[:, order]], [valid])
    np.testing.assert_array_equal(other, one[:, order])


@pytest.mark.parametrize("windows", [(1,), (3,), (7,), ()])
@pytest.mark.parametrize("n", [40, 600])
def test_infinipot_selects_what_the_cpu_selects(make, n, windows):
    """Several tokens of one patch and frame among them; rows of a prefix and of text stay out of the choice."""
    random = np.random.default_rng(n)
    kind = random.choice([Kind.PREFIX, Kind.VISION, Kind.TEXT], (2, n), p=[0.05, 0.9, 0.05]).astype(np.uint8)
    rows = held(random, n, 16, kind=kind, frames=9, side=5)
    thresholds = () if windows else (0.05, 0.16, 0.4)
    caches = [cache_of(where, rows) for where in (make, backend("cpu"))]
    for distinctive, target, recent, keep in (
        (n // 8, n // 2, 2, True),
        (0, n // 4, 1, False),
        (5, 6, 9, True),
        (0, 0, 0, True),
    ):
        mine, theirs = (
            kernels.infinipot_select(cache, recent, distinctive, target, windows, thresholds, keep_recent=keep)
            for cache in caches
        )
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(1, 2), (64, 16), (65, 20), (200, 80)])
def test_newer_similarity(make, n, width, dtype):
    random = np.random.default_rng(n)
    rows = held(random, n, width, dtype)
    rows["key"][:, 0] = 0
    cache = cache_of(make, rows)
    for rotated in (False, True):
        for since in (0, n):
            valid = random.random((2, n)) < 0.8
            found = kernels.newer_similarity(cache, 0, valid, since, rotated=rotated)
            arguments = (rows["key"], rows["position"], rows["seq"], valid, cache.inv_freq)
            expected = reference.newer_similarity(*arguments, since=since, rotated=rotated)
            np.testing.assert_allclose(found, expected, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [0, 1, 40])
@pytest.mark.parametrize("own", [0, 70])
def test_attention_mass_with_more_query_rows_than_a_batch(make, queries, own, dtype):
    random = np.random.default_rng(queries + own)
    rows, group = held(random, 130, 24, dtype), 3
    cache = cache_of(make, rows)
    query = 3 * random.standard_normal((2 * group, queries, 24)).astype(np.float32)
    query_seq = random.integers(-2, 400, queries)
    keys = random.standard_normal((2, own, 24)).astype(np.float32) if own else None
    places = np.sort(random.integers(0, 400, own)) if own else None
    found = kernels.attention_mass(query, query_seq, cache.key(0), cache.seq(0), keys, places)
    key, seq = rows["key"].astype(np.float64), rows["seq"]
    if own:
        key, seq = np.concatenate([key, keys], 1), np.concatenate([seq, np.tile(places, (2, 1))], 1)
    expected = reference.attention_mass(query, query_seq, key, seq)[:, :130]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


def test_int8_is_refused(make):
    with pytest.raises(UserError, match="supports fp16 and fp32, not int8"):
        make(1, 1, 8, 4, inv_freq=np.ones(4), dtype="int8")
