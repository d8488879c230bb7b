"""Native kernels against their plain float64 twins: random, and as nasty as it gets."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.kv import KVScales, codes

QUICK = settings(deadline=None, max_examples=25)
pytestmark = pytest.mark.usefixtures("isa")


def strided(array, rng):
    """The same numbers in memory that is not dense: part of a larger array, as a layer's valid rows are."""
    larger = rng.integers(0, 2, (array.shape[0] + 1, array.shape[1] + 3, *array.shape[2:])).astype(array.dtype)
    view = larger[: array.shape[0], : array.shape[1]]
    view[...] = array
    return view


@st.composite
def scenes(draw):
    """Tokens ``[H, n]`` of a few frames and patches: holes, duplicates, missing counterparts, one frame, no rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads, n = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 7, 30, 60]))
    frames, side = draw(st.sampled_from([1, 2, 9])), draw(st.sampled_from([1, 3, 8, 64]))
    shape = (heads, n)
    corners = draw(st.sampled_from([[0], [0], [32767 - 63], [-32768], [-32768, 32767 - side + 1]]))  # of int16
    across = rng.choice(corners, shape)
    far = draw(st.sampled_from([0, 0, -(2**31), 2**31 - 9]))
    scene = {
        "frame": (far + rng.integers(0, frames, shape)).astype(np.int32),
        "row": (rng.choice(corners[:1]) + rng.integers(0, side, shape)).astype(np.int16),
        "col": (across + rng.integers(0, side, shape)).astype(np.int16),
        "valid": rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "recent": rng.random(shape) < draw(st.sampled_from([0.0, 0.2, 0.7, 1.0])),
    }
    if draw(st.booleans()):
        scene = {name: strided(array, rng) for name, array in scene.items()}
    return rng, heads, n, scene


@given(scenes(), st.data())
@QUICK
def test_temporal_similarity(scene, data):
    rng, heads, n, tokens = scene
    dim, axes = data.draw(st.sampled_from([2, 6, 8, 64, 72])), data.draw(st.sampled_from([1, 3]))
    dtype = data.draw(st.sampled_from([np.float32, np.float16, np.int8]))
    size = data.draw(st.sampled_from([1, 1e-6, 1e4] if dtype == np.float16 else [1, 1e-30, 1e18]))
    numbers = size * rng.standard_normal((heads, n, dim))
    scale = np.tile(size * rng.uniform(0.02, 0.05, (heads, dim // 2)), 2).astype(np.float32) if dtype == np.int8 else None
    key = numbers.astype(dtype) if scale is None else codes(numbers, scale)
    key[rng.random((heads, n)) < data.draw(st.sampled_from([0, 0.3]))] = 0
    if data.draw(st.booleans()) and n:
        key[:] = key[:, :1]  # all alike
    least, most = data.draw(st.sampled_from([(0, 1), (0, 64), (0, 5000), (2**18 - 50, 2**18 + 50), (0, 2**31 - 1)]))
    position = rng.integers(least, most, (heads, n, axes), dtype=np.int32)
    sections = None if axes == 1 else np.bincount(rng.integers(0, 3, dim // 2), minlength=3).tolist()
    inv_freq = 1 / 1e4 ** (np.arange(0, dim, 2) / dim)
    scales = None if scale is None else KVScales(scale[None], scale[None])
    kind = {np.float32: "fp32", np.float16: "fp16", np.int8: "int8"}[dtype]
    cache = KVCache(1, heads, dim, n + 1, inv_freq=inv_freq, axes=axes, sections=sections, dtype=kind, scales=scales)
    of_rows = {"frame": tokens["frame"], "confirmed": tokens["frame"], "row": tokens["row"], "col": tokens["col"]}
    seq = np.broadcast_to(np.arange(n), (heads, n)).copy()
    vision = np.full((heads, n), Kind.VISION, np.uint8)
    cache.load(0, {"key": key, "value": key, "kind": vision, "seq": seq, "position": position, **of_rows})
    rotated = data.draw(st.booleans())
    [(found, _)] = kernels.infinipot_scores(cache, [tokens["recent"]], [tokens["valid"]], rotated=rotated)
    exact = key if scale is None else key * scale[:, None].astype(np.float64)
    arguments = (exact, position, *(tokens[name] for name in ("row", "col", "recent", "valid")), inv_freq)
    expected = reference.temporal_similarity(*arguments, rotated=rotated, pair_axis=cache.pair_axis)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@given(st.data())
@QUICK
def test_value_norms(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = tuple(data.draw(st.sampled_from([(1, 0, 4), (2, 5, 1), (3, 17, 7), (1, 30, 64), (2, 3, 0)])))
    value = rng.standard_normal(shape) * data.draw(st.sampled_from([1, 0, 1e-42, 1e19, 1e37]))
    value = value.astype(
        data.draw(st.sampled_from([np.float32, np.float16])) if np.abs(value).max(initial=0) < 6e4 else np.float32
    )
    if data.draw(st.booleans()):
        value = strided(value, rng)
    np.testing.assert_allclose(kernels.value_norms(value), reference.value_norms(value), rtol=1e-6, atol=2e-45)


@pytest.mark.parametrize("size", [1, 1e-42, 1e19, 1e35])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_value_norms_of_codes(size, width):
    rng = np.random.default_rng(width)
    value = rng.integers(-128, 128, (2, 17, width)).astype(np.int8)
    scale = (size * rng.uniform(0.5, 1, (2, width))).astype(np.float32)
    exact = value * scale[:, None].astype(np.float64)
    np.testing.assert_allclose(kernels.value_norms(value, scale), reference.value_norms(exact), rtol=1e-6, atol=2e-43)


@given(scenes(), st.integers(0, 12))
@QUICK
def test_newest_frames(scene, count):
    _, _, _, tokens = scene
    found = kernels.newest_frames(tokens["frame"], tokens["valid"], count)
    np.testing.assert_array_equal(found, reference.newest_frames(tokens["frame"], tokens["valid"], count))


@given(scenes(), st.data())
@QUICK
def test_pool_norms(scene, data):
    rng, heads, n, tokens = scene
    norms = (rng.random((heads, n)) * data.draw(st.sampled_from([1, 0, 1e19]))).astype(np.float32)
    arguments = (norms, *(tokens[name] for name in ("frame", "row", "col", "valid")))
    for window in (1, 3, 5, 7):
        found = kernels.pool_norms(*arguments, window)
        np.testing.assert_allclose(found, reference.pool_norms(*arguments, window), rtol=1e-6)


def test_pooling_of_a_whole_frame_is_an_average_with_cut_edges(kit):
    if kit.sanitized:
        pytest.skip("torch does not load under the sanitizer")
    torch = pytest.importorskip("torch")
    rng, side = np.random.default_rng(0), 27
    norms = rng.random((2, side * side), np.float32)
    row, col = (np.broadcast_to(axis.reshape(1, -1), norms.shape).astype(np.int16) for axis in np.indices((side, side)))
    frame, valid = np.full(norms.shape, 5, np.int32), np.ones(norms.shape, np.bool_)
    for window in (1, 3, 5, 7):
        grid = torch.from_numpy(norms.reshape(2, 1, side, side))
        pooled = torch.nn.functional.avg_pool2d(grid, window, 1, window // 2, count_include_pad=False)
        found = kernels.pool_norms(norms, frame, row, col, valid, window)
        np.testing.assert_allclose(found, pooled.numpy().reshape(2, -1), rtol=1e-5)


TIES = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38])


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_top_k(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    heads, n = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 40))
    if data.draw(st.booleans()):
        flat = data.draw(st.lists(TIES, min_size=heads * n, max_size=heads * n))
        scores = np.array(flat, np.float32).reshape(heads, n)
    else:
        scores = rng.standard_normal((heads, n), np.float32)
    seq = np.stack([rng.permutation(10 * n + 1)[:n] for _ in range(heads)]).astype(np.int64)
    seq += data.draw(st.sampled_from([0, 2**40, -(2**62)]))
    if data.draw(st.booleans()):
        seq //= 4  # the same seq twice
    candidates = rng.random((heads, n)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    if data.draw(st.booleans()):
        scores, seq, candidates = (strided(array, rng) for array in (scores, seq, candidates))
    k = data.draw(st.integers(0, n + 3))
    found = kernels.top_k(scores, seq, candidates, k)
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, reference.top_k(scores, seq, candidates, k))
    assert found.sum(1).tolist() == np.minimum(k, candidates.sum(1)).tolist()


@pytest.mark.parametrize("far", [0.0, 1e30, np.inf, np.nan])
def test_top_k_of_scores_that_lie_close_together_but_one(far):
    """One score far off leaves all others in few of the first buckets."""
    rng = np.random.default_rng(0)
    scores = (10 + rng.random((2, 1000)) * [[1], [1e-4]]).astype(np.float32)
    scores[:, 500] = far
    seq, candidates = rng.permuted(np.tile(np.arange(1000), (2, 1)), axis=1), rng.random((2, 1000)) < 0.8
    for k in (1, 300, 799):
        found = kernels.top_k(scores, seq, candidates, k)
        np.testing.assert_array_equal(found, reference.top_k(scores, seq, candidates, k))


@given(st.data())
@QUICK
def test_index_of(data):
    """Of dense ranges, strided ones and far ones, with gaps and the same seq twice."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    heads, n, m = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    step, first = data.draw(st.sampled_from([1, 196, 2**20, 2**55])), data.draw(st.sampled_from([0, -5, 2**62, -(2**63)]))
    span = data.draw(st.sampled_from([10, 50, 90]))
    seq, known = (first + step * rng.integers(0, span, (heads, count)) for count in (n, m))
    if data.draw(st.booleans()):
        seq, known = strided(seq, rng), strided(known, rng)
    found = kernels.index_of(seq, known)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, reference.index_of(seq, known))
    score, into = rng.standard_normal((heads, m), np.float32), rng.standard_normal((heads, n), np.float32)
    expected = np.where(found < 0, into, np.take_along_axis(score, np.maximum(found, 0), 1) if m else into)
    kernels.join(seq, known, score, into)
    np.testing.assert_array_equal(into, expected)


def test_scores_of_all_layers_are_those_of_each(kit):
    cache = kit.make(layers=3, capacity=[40, 50, 60])
    kit.append(cache, 40)
    cache.evict([kit.random_keep(np.random.default_rng(0), 2, 40, kept) for kept in (40, 31, 0)])
    rng = np.random.default_rng(1)
    valid = [rng.random((2, int(n))) < 0.9 for n in cache.lengths]
    recent = [kernels.newest_frames(cache.frame(layer), mask, 2) for layer, mask in enumerate(valid)]
    for rotated in (False, True):
        both = kernels.infinipot_scores(cache, recent, valid, rotated=rotated)
        for layer, (similarity, norms) in enumerate(both):
            patch = cache.position(layer), cache.row(layer), cache.col(layer)
            arguments = (cache.dequantize("key", layer), *patch, recent[layer], valid[layer], cache.inv_freq)
            np.testing.assert_allclose(similarity, reference.temporal_similarity(*arguments, rotated=rotated), atol=1e-5)
            np.testing.assert_array_equal(norms, kernels.value_norms(cache.value(layer), cache.value_scale(layer)))
    with pytest.raises(CacheError, match="one mask for each of the 3 layers, not 2 and 3"):
        kernels.infinipot_scores(cache, recent[:2], valid)
    with pytest.raises(CacheError, match=r"recent must be \[2, 31\], not \[2, 40\]"):
        kernels.infinipot_scores(cache, [recent[0]] * 3, valid)
    with pytest.raises(CacheError, match="open the cache with rotary sections"):
        kernels.infinipot_scores(kit.make(layers=1, axes=3), [np.ones((2, 0), np.bool_)], [np.ones((2, 0), np.bool_)])


SELECTIONS = [
    {"windows": [7, 3, 1]},
    {"windows": [5, 5, 5], "rotated": True},
    {"windows": [3, 3, 3], "keep_recent": False},
    {"windows": [], "thresholds": [0.05, 0.3, 0.6]},
    {"windows": [7, 7, 7], "recent_frames": 0},
    {"windows": [1, 1, 1], "distinctive": 0},
    {"windows": [1, 1, 1], "target": 20},  # fewer than the recent frames hold: the newest of what was chosen
    {"windows": [1, 1, 1], "target": 999},  # more than there are
]


@pytest.mark.parametrize("settings", SELECTIONS, ids=str)
def test_selecting_is_the_scores_one_after_another(kit, settings):
    """Bit for bit what the other kernels choose when they are called in turn; those are tested against the reference."""
    cache, rng = kit.make(layers=3, capacity=[140, 150, 160], head_dim=16), np.random.default_rng(2)
    kit.append(cache, 5, kind=Kind.PREFIX, per_frame=16, width=4)
    kit.append(cache, 135, start=16, per_frame=16, width=4, rng=rng)
    kept = [np.arange(140) < 5 for _ in range(6)]
    for mask in kept:
        mask[5 + rng.permutation(135)[:110]] = True
    cache.evict(list(np.array(kept).reshape(3, 2, 140)))
    how = {"recent_frames": 2, "distinctive": 15, "target": 60, "rotated": False, "keep_recent": True, "thresholds": []}
    how |= settings
    found = kernels.infinipot_select(cache, **how)
    vision = [cache.kind(layer) == Kind.VISION for layer in range(3)]
    recent = [kernels.newest_frames(cache.frame(layer), vision[layer], how["recent_frames"]) for layer in range(3)]
    scores = kernels.infinipot_scores(cache, recent, vision, rotated=how["rotated"])
    for layer, (similarity, norms) in enumerate(scores):
        seq, among = cache.seq(layer), vision[layer]
        chosen = kernels.top_k(-similarity, seq, among & ~recent[layer], how["distinctive"])
        chosen |= recent[layer] & how["keep_recent"]
        spread = norms[among].std(dtype=np.float64) / norms[among].mean(dtype=np.float64)
        window = how["windows"][layer] if how["windows"] else 7 - 2 * sum(spread >= tau for tau in how["thresholds"])
        pooled = kernels.pool_norms(norms, cache.frame(layer), cache.row(layer), cache.col(layer), among, window)
        best = np.where(chosen, np.float32(np.inf), pooled)
        expected = ~among | kernels.top_k(best, seq, among, how["target"])
        np.testing.assert_array_equal(found[layer], expected)
