"""One block, its size known before, everything in it where it should be."""

import weakref
from itertools import pairwise

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import PARTS, KVCache


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("heads", "dim", "capacity", "axes"), [(1, 2, 1, 1), (3, 96, [3, 50, 129], 3), (2, 64, 1000, 1), (2, 64, 1000, 3)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_byte_count_is_known_before(kit, threads, heads, dim, capacity, axes):
    kernels.set_threads(threads)
    try:
        shape = {"inv_freq": kit.frequencies(dim), "axes": axes, "dtype": kit.dtype}
        scales = kit.scales(3, heads, dim) if kit.dtype == "int8" else None
        known = KVCache.bytes_for(3, heads, dim, capacity, **shape)
        cache = KVCache(3, heads, dim, capacity, **shape, scales=scales)
    finally:
        kernels.set_threads(1)
    assert known == cache.nbytes == cache.memory.nbytes
    assert cache.allocations == 1
    rows = sum(capacity) if isinstance(capacity, list) else 3 * capacity
    metadata = 1 + 8 + 4 + 2 + 2 + 4 * axes + 4 + 4  # kind, seq, frame, row, col, position, confirmed, norm
    assert known >= rows * heads * (2 * dim * kit.numpy.itemsize + metadata)


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
def test_views_are_read_only(kit):
    cache = kit.make()
    kit.append(cache, 3)
    for name in PARTS:
        view = getattr(cache, name)(0)
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        cache.memory[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        cache.inv_freq[0] = 0


def test_the_memory_goes_with_the_last_view(kit):
    cache = kit.make()
    alive = weakref.ref(cache)
    views = [cache.key(0), cache.seq(0)[:, :0], cache.memory[3:]]
    del cache
    while views:
        assert alive() is not None
        views.pop()
    assert alive() is None


def test_more_memory_than_there_is(kit):
    if kit.sanitized:
        pytest.skip("the sanitizer stops at a failed allocation")
    with pytest.raises(CacheError, match="cannot allocate"):
        KVCache(64, 64, 1024, 2**31 - 1, inv_freq=np.ones(512))
