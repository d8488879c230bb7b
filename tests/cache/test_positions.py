"""Keys turned from one position to another, and positions made dense."""

from types import SimpleNamespace

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.engine import arrays_of
from edgevlm.runtime.policies import Layer
from edgevlm.runtime.policies.attention import QueryWindow
from edgevlm.runtime.policies.hermes import summary_of

pytestmark = pytest.mark.usefixtures("isa")

PLACES = st.one_of(  # where the table of angles has one, two and three digits, and where it ends
    st.integers(0, 80), st.integers(0, 2**18), st.integers(2**18 - 9, 2**18 + 9), st.integers(2**31 - 99, 2**31 - 1)
)


AXES = st.sampled_from([{}, {"axes": 3, "sections": (1, 1, 2)}, {"axes": 3, "sections": (2, 1, 1), "interleaved": True}])


def place(kit, cache, raw, position):
    """Append keys ``raw [H, n, D]`` rotated to ``position [n]`` or ``[n, axes]``; the same in every layer."""
    n = len(position)
    cache.reserve(n)
    for buffer in cache.buffers():
        places = position if cache.axes > 1 else position.reshape(n)
        rotated = reference.rotate(raw, places, cache.inv_freq, cache.pair_axis)
        kit.memory(buffer)[0][:, :n] = kit.stored(rotated, buffer.key_scale, buffer.dtype)
    rows = kit.rows(n, axes=cache.axes)
    rows.position[:] = position.reshape(n, cache.axes)
    cache.commit(rows)


def assert_stored(kit, cache, head, expected):
    """Keys of layer 0 are the ``expected`` numbers, stored, turned and rounded once more; an error of a pair turns with it."""
    scale = 1 if cache.dtype != np.int8 else cache.key_scale(0)[head]
    error = np.abs(cache.dequantize("key", 0)[head] - expected) / scale
    assert error.max() <= 2.5 * kit.error


SHAPES = [
    {"head_dim": 2},
    {"head_dim": 6},
    {"head_dim": 64},
    {"head_dim": 8, "axes": 3, "sections": (1, 1, 2)},
    {"head_dim": 8, "axes": 3, "sections": (0, 4, 0)},
    {"head_dim": 128, "axes": 3, "sections": (16, 24, 24)},  # Qwen2-VL
    {"head_dim": 128, "axes": 3, "sections": (24, 20, 20), "interleaved": True},  # Qwen3-VL
]


@given(st.sampled_from(SHAPES), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=15)
def test_shift_equals_the_reference(kit, shape, n, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cache = kit.make(layers=2, kv_heads=2, **shape)
    axes = cache.axes

    def places(count):
        return np.array(data.draw(st.lists(PLACES, min_size=count * axes, max_size=count * axes)), np.int32).reshape(
            count, axes
        )

    place(kit, cache, rng.standard_normal((2, n, cache.head_dim)), places(n))
    new = places(2 * n).reshape(2, n, axes)
    before, untouched = kit.arrays(cache, 1), kit.arrays(cache, 0)
    cache.shift(1, new)
    after = kit.arrays(cache, 1)
    expected = reference.shift(before["key"], before["position"], new, cache.inv_freq, cache.pair_axis)
    np.testing.assert_allclose(after["key"], expected, atol=kit.error, rtol=0)
    np.testing.assert_array_equal(after["position"], new)
    for name in ("value", "seq", "kind", "frame", "row", "col"):
        np.testing.assert_array_equal(after[name], before[name])
    for name, array in kit.arrays(cache, 0).items():
        np.testing.assert_array_equal(array, untouched[name])


MODELS = {  # the module whose rotation a key has, and the sections of its axes
    "llama.modeling_llama": {},
    "qwen2.modeling_qwen2": {},
    "qwen2_vl.modeling_qwen2_vl.Qwen2VLRotaryEmbedding": {"axes": 3, "sections": (16, 24, 24)},
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding": {"axes": 3, "sections": (24, 20, 20), "interleaved": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_shifted_key_is_what_hugging_face_would_have_stored(kit, model):
    if kit.sanitized:
        pytest.skip("torch does not load under the sanitizer")
    torch = pytest.importorskip("torch")
    family, name, *embedding = model.split(".")
    module = pytest.importorskip(f"transformers.models.{family}.{name}")
    rng, dim, n = np.random.default_rng(0), 128, 40
    cache = kit.make(layers=1, kv_heads=2, head_dim=dim, capacity=n, **MODELS[model])
    raw = rng.standard_normal((2, n, dim)).astype(np.float32)
    place(kit, cache, raw, rng.integers(0, 500, (n, cache.axes), dtype=np.int32))
    new = rng.integers(0, 3000, (2, n, cache.axes), dtype=np.int32)
    cache.shift(0, new)
    for head in range(2):
        angle = torch.from_numpy(new[head].T[:, None, :, None] * cache.inv_freq)  # [axes, 1, n, dim / 2]
        if embedding:
            compose, this = getattr(module, *embedding).recomposition_frequencies, SimpleNamespace()
            this.mrope_section = list(MODELS[model]["sections"])
            cos, sin = (compose(this, part.clone()).float() for part in (angle.cos(), angle.sin()))
        else:
            cos, sin = (torch.cat([part[0]] * 2, -1).float() for part in (angle.cos(), angle.sin()))
        key = torch.from_numpy(raw[head])[None, None]
        _, rotated = module.apply_rotary_pos_emb(key, key, cos, sin)
        assert_stored(kit, cache, head, rotated[0, 0].numpy())


def test_the_drift_of_many_shifts(kit, isa):
    """Relative error of a key after 10,000 random shifts, each rounded to the cache's dtype, 100 of int8 or on a device.

    Measured, at worst of 64 keys: fp32 5.4e-6, fp16 2.5e-2, int8 0.23; bounded at twice that. A token meets one
    re-indexing whenever the stream has used up its positions, so 10,000 are months for a token that is never evicted.
    """
    rng, n, dim, limit = np.random.default_rng(0), 64, 64, 32768
    cache = kit.make(layers=1, kv_heads=1, head_dim=dim, capacity=n)
    raw = rng.standard_normal((1, n, dim))
    place(kit, cache, raw, np.arange(n, dtype=np.int32))
    start = cache.key(0).copy()  # codes turn as numbers do: a pair has one scale
    shifts = 100 if kit.dtype == "int8" or kit.where != "cpu" else 10_000
    for _ in range(shifts):
        cache.shift(0, rng.integers(0, limit, (1, n, 1), dtype=np.int32))
    end = cache.position(0)
    exact = reference.shift(start, np.arange(n, dtype=np.int32).reshape(1, n, 1), end, cache.inv_freq)
    error = np.linalg.norm(cache.key(0) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    print(f"drift after {shifts} shifts in {kit.dtype} by {isa}: worst {error.max():.2e}, mean {error.mean():.2e}")
    assert error.max() < {"fp32": 1.1e-5, "fp16": 0.05, "int8": 0.5}[kit.dtype]


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_reindex_equals_the_reference(kit, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cache = kit.make(layers=3, kv_heads=2, capacity=40, **data.draw(AXES))
    n, prefix = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 12))
    axes = cache.axes
    raw = rng.standard_normal((2, n, 8))
    gap = data.draw(st.sampled_from([1, 2, 50, 10_000]))
    steps = rng.integers(0, gap, (n, axes)) * (np.arange(n) >= prefix)[:, None]
    position = np.minimum(np.arange(n), prefix)[:, None] + np.cumsum(steps, 0)
    place(kit, cache, raw, position.astype(np.int32))  # equal positions occur, as in a summary beside its token
    cache.evict([kit.random_keep(rng, 2, n, data.draw(st.integers(0, n))), None, kit.random_keep(rng, 2, n, n // 2)])
    before = [kit.arrays(cache, layer) for layer in range(3)]
    expected, following = reference.reindex([rows["position"] for rows in before], prefix)
    assert cache.reindex(prefix) == following
    for layer in range(3):
        after = kit.arrays(cache, layer)
        np.testing.assert_array_equal(after["position"], expected[layer])
        np.testing.assert_array_equal(after["seq"], before[layer]["seq"])
        shifted = reference.shift(
            before[layer]["key"], before[layer]["position"], expected[layer], cache.inv_freq, cache.pair_axis
        )
        np.testing.assert_allclose(after["key"], shifted, atol=kit.error)
    assert cache.reindex(prefix) == following  # dense already
    for layer in range(3):
        np.testing.assert_array_equal(cache.position(layer), expected[layer])


def test_layers_with_a_base_of_their_own_turn_by_it():
    bases = [1 / base ** (np.arange(4) / 4) for base in (1e4, 50.0)]
    cache = KVCache(2, 1, 8, 8, inv_freq=np.concatenate(bases), local=(0, 1))
    raw, position = np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32), np.array([2, 9, 40], np.int32)
    cache.reserve(3)
    for buffer, base in zip(cache.buffers(), bases, strict=True):
        arrays_of(buffer)[0][:, :3] = reference.rotate(raw, position, base)
    cache.commit(Rows.text(position[:, None]))
    for layer in range(2):
        np.testing.assert_allclose(Layer(cache, layer).keys, raw, atol=1e-5)
    cache.shift(1, np.array([[[7], [8], [9]]], np.int32))
    assert cache.reindex(0) == 3
    for layer, base in enumerate(bases):
        np.testing.assert_allclose(cache.key(layer), reference.rotate(raw, np.arange(3, dtype=np.int32), base), atol=1e-5)


def test_policies_turn_a_layer_by_its_own_base():
    """A layer with a base of its own gives what it gives in a cache where every layer has that base."""
    bases, size, rng = [1 / base ** (np.arange(4) / 4) for base in (1e4, 50.0)], 24, np.random.default_rng(0)
    caches = [
        KVCache(2, 1, 8, 32, inv_freq=np.concatenate(bases), local=(0, 1)),
        KVCache(2, 1, 8, 32, inv_freq=bases[1]),
    ]
    position, raw = np.arange(3, 3 + 7 * size, 7, dtype=np.int32), rng.standard_normal((1, size, 8)).astype(np.float32)
    queries = reference.rotate(rng.standard_normal((1, size, 8)).astype(np.float32), position, bases[1])
    seq, place = np.arange(size), np.arange(size, dtype=np.int16) % 8
    rows = Rows(
        np.full(size, Kind.VISION, np.uint8), seq, (seq // 8).astype(np.int32), place // 4, place % 4, position[:, None]
    )
    found = []
    for cache in caches:
        cache.reserve(size)
        for index, buffer in enumerate(cache.buffers()):
            base = bases[min(index, 1) if cache is caches[0] else 1]
            arrays_of(buffer)[0][:, :size] = reference.rotate(raw, position, base)
            arrays_of(buffer)[1][:, :size] = raw[..., ::-1]
        cache.commit(rows)
        layer, all_rows, recent = Layer(cache, 1), np.ones((1, size), np.bool_), (seq >= 16)[None]
        scores = kernels.infinipot_scores(cache, [recent] * 2, [all_rows] * 2)[1]
        newer = kernels.newer_similarity(cache, 1, all_rows)
        summary = summary_of(layer, seq < 5, np.ones(size), 11)
        window = QueryWindow(4)
        window.add(SimpleNamespace(seq=seq, position=position[:, None], queries={1: queries}))
        cache.reindex(0)
        found.append([*scores, newer, summary.key, window.at(Layer(cache, 1))[0]])
    for own, plain in zip(*found, strict=True):
        np.testing.assert_allclose(own, plain, atol=1e-5)
