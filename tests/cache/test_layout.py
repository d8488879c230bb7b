"""One block, its size known before, everything in it where it should be."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import KVCache


def up(count):
    return (count + 63) // 64 * 64


def slots(rows):
    """Of a hash table with room for ``rows`` keys."""
    return max(2, 1 << (2 * rows - 1).bit_length())


def formula(layers, heads, dim, capacities, axes, item):
    """The layout comment in csrc/cache.cpp as sums: (what lies before the rows, the rows, what lies behind them)."""
    runs = 1 if axes == 1 else 0  # without sections
    before = up(layers * 104) + up(dim // 2 * 8) + up(runs * 12) + up(min(capacities) * 8)
    rows = 0
    for capacity in capacities:
        places = heads * capacity
        rows += 2 * up(heads * dim * 4) * (item == 1)
        rows += 2 * up(places * dim * item)
        rows += up(places) + up(places * 8) + up(places * 4) + 2 * up(places * 2) + up(places * axes * 4) + up(places * 4)
    angles = up(3 * 64 * dim * 8) + up(3 * 64 * dim * 4)
    n = max(capacities)
    means = min(max((1 << 17) // dim, 1), n)
    attention = up(n * 32 * 4) + up(dim * 32 * 4) + up(64 * dim * 4) + 2 * up(32 * 4)
    vectors = up((256 + 8) * dim * 4) + 2 * up(dim * 8) + 2 * up(dim // 2 * 8) + up(dim * 4)
    similarity = up(slots(n) * 8) + 4 * up(n * 4) + up(means * dim * 4) + vectors
    grids = 3 * (up(4096 * 8) + up(4096 * 4))
    pool = max(up(n * 16), grids + 3 * up(n * 4) + up((n + 1) * 4) + up(slots(n) * 8))
    top = 2 * up(n * 4)
    chosen = 2 * up(n * 4) + 2 * up(heads * n) + 2 * up(n)
    infinipot = chosen + max(similarity, pool, top, up(n * heads * 4))
    batch = min(max(n * 32 // dim // 32 * 32, 32), 1024)
    turned = up((256 + 8) * dim * 4) + up(dim * 4)
    newer = up(n * 4) + turned + up(batch * dim * 4) + up(batch * 4) + up(64 * dim * 4) + up(64 * 32 * 4)
    reindex = up(n * 8) + up(n * 4) + up(n * axes * 4) + 2 * up(dim // 2 * 8) + 2 * up(dim // 2 * 4)
    scratch = kernels.threads() * max(infinipot, attention, newer, reindex)
    return before, rows, angles + up(scratch)


@pytest.fixture(params=[1, 3])
def threads(request):
    kernels.set_threads(request.param)
    yield request.param
    kernels.set_threads(1)


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000, [3, 50, 129]])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [2, 64, 96])
@pytest.mark.parametrize("axes", [1, 3])
def test_byte_count_is_known_before(kit, threads, capacity, heads, dim, axes):
    arguments = (3, heads, dim, capacity)
    known = KVCache.bytes_for(*arguments, inv_freq=kit.frequencies(dim), axes=axes, dtype=kit.dtype)
    scales = kit.scales(3, heads, dim) if kit.dtype == "int8" else None
    cache = KVCache(*arguments, inv_freq=kit.frequencies(dim), axes=axes, dtype=kit.dtype, scales=scales)
    assert known == cache.nbytes == cache.memory.nbytes
    before, rows, behind = formula(
        3, heads, dim, capacity if isinstance(capacity, list) else [capacity] * 3, axes, kit.numpy.itemsize
    )
    assert known == before + rows + behind
    scale_bytes = 0 if scales is None else 2 * up(heads * dim * 4)
    assert cache.buffers()[0].key_address == cache.memory.ctypes.data + before + scale_bytes
    if scales is None:
        assert not cache.memory[before : before + rows].any()
    assert cache.allocations == 1


@pytest.mark.cpu
def test_buffers_are_aligned_and_lie_in_the_block(kit):
    cache = kit.make(layers=4, kv_heads=3, head_dim=10, capacity=[5, 7, 11, 13])
    start = cache.memory.ctypes.data
    assert start % 64 == 0
    spans = []
    for layer, buffer in enumerate(cache.buffers()):
        assert buffer.shape == (1, 3, (5, 7, 11, 13)[layer], 10)
        assert buffer.dtype == kit.numpy
        assert buffer.owner is cache
        for address in (buffer.key_address, buffer.value_address):
            assert address % 64 == 0
            spans.append((address, address + int(np.prod(buffer.shape)) * kit.numpy.itemsize))
    spans.sort()
    assert spans[0][0] >= start
    assert spans[-1][1] <= start + cache.nbytes
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.cpu
def test_views_show_the_valid_rows_where_the_buffers_are(kit):
    cache = kit.make()
    new = kit.append(cache, 6)
    for layer, buffer in enumerate(cache.buffers()):
        key, value = kit.memory(buffer)
        assert cache.key(layer).ctypes.data == buffer.key_address
        np.testing.assert_array_equal(cache.key(layer), key[:, :6])
        np.testing.assert_array_equal(cache.value(layer), value[:, :6])
        for name in ("kind", "seq", "frame", "row", "col", "position"):
            view, given = getattr(cache, name)(layer), getattr(new, name)
            assert view.dtype == given.dtype
            np.testing.assert_array_equal(view, np.stack([given] * 2))


@pytest.mark.cpu
def test_views_are_read_only(kit):
    cache = kit.make()
    kit.append(cache, 3)
    for name in ("key", "value", "kind", "seq", "frame", "row", "col", "position"):
        view = getattr(cache, name)(0)
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        cache.memory[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        cache.inv_freq[0] = 0


def test_lengths_and_capacities_are_copies(kit):
    cache = kit.make()
    kit.append(cache, 3)
    cache.lengths[:] = 9
    cache.capacities[:] = 9
    assert cache.lengths.tolist() == [3, 3]
    assert cache.capacities.tolist() == [32, 32]
    assert cache.lengths.dtype == cache.capacities.dtype == np.int32


def test_a_view_keeps_the_memory_alive(kit):
    cache = kit.make(capacity=4096)
    kit.append(cache, 4000)
    view, expected = cache.key(1), cache.key(1).copy()
    del cache
    gc.collect()
    others = [kit.make(capacity=4096) for _ in range(4)]
    np.testing.assert_array_equal(view, expected)
    assert len(others) == 4


def test_the_memory_goes_with_the_last_view(kit):
    native = kit.make().native
    alive = weakref.ref(native)
    views = [native.key(0), native.seq(0)[:, :0], native.memory[3:]]
    del native
    while views:
        assert alive() is not None
        views.pop()
    assert alive() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"kv_heads": 0}, "kv_heads must lie in"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": 0}, "head_dim must be even"),
        ({"capacity": 0}, "capacity of layer 0"),
        ({"capacity": [4, -1]}, "capacity of layer 1"),
        ({"capacity": 2**31}, "capacity of layer 0"),
        ({"capacity": [4]}, "each of the 2 layers, not 1"),
        ({"axes": 2}, "axes must be 1, or 3"),
        ({"dtype": "bf16"}, "dtype must be fp32, fp16 or int8, not bf16"),
        ({"axes": 3, "sections": (1, 1, 1)}, r"3 numbers that add up to head_dim / 2 = 4, not \[1, 1, 1\]"),
        ({"axes": 3, "sections": (2, 2)}, "sections must be 3 numbers"),
        ({"axes": 3, "sections": (0, 2, 2), "interleaved": True}, "cannot be interleaved over 4 pairs"),
        ({"inv_freq": np.ones(3)}, "head_dim / 2 = 4 numbers, not 3"),
        ({"inv_freq": np.ones(4, np.float32)}, "inv_freq must be float64, not float32"),
        ({"inv_freq": np.ones((2, 2))}, r"inv_freq must be \[any\], not \[2, 2\]"),
        ({"inv_freq": [1.0] * 4}, "inv_freq must be a numpy array of float64"),
        ({"inv_freq": np.array([1, np.nan, 1, 1])}, "inv_freq must be finite"),
        ({"capacity": 2**31 - 1, "kv_heads": 65536, "head_dim": 65536, "inv_freq": np.ones(32768)}, "smaller budget"),
    ],
)
def test_shapes_that_cannot_be(kit, change, message):
    arguments = {"layers": 2, "kv_heads": 2, "head_dim": 8, "capacity": 4, "inv_freq": kit.frequencies(8), **change}
    with pytest.raises(CacheError, match=message):
        KVCache.bytes_for(**arguments)
    with pytest.raises(CacheError, match=message):
        KVCache(**arguments)


def test_more_memory_than_there_is(kit):
    if kit.sanitized:
        pytest.skip("the sanitizer stops at a failed allocation")
    with pytest.raises(CacheError, match="cannot allocate"):
        KVCache(64, 64, 1024, 2**31 - 1, inv_freq=np.ones(512))
