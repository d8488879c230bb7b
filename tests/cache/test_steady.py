"""A stream that runs for long takes no more memory than it started with."""

import ctypes
import gc
import platform

import numpy as np
import pytest

from edgevlm.runtime import _native, kernels

pytestmark = pytest.mark.cpu

ROUNDS, FRAME = 1000, 16


class MallInfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def malloc_in_use():
    """Bytes that malloc has handed out, as glibc counts them: the heap and mapped blocks."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo2
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def run(kit, cache, rounds, start, rng):
    """Append a frame, score, evict, now and then ask a question or make positions dense."""
    position = int(max(cache.position(layer).max(initial=-1) for layer in range(cache.layers))) + 1
    for turn in range(start, start + rounds):
        if cache.lengths.max() + FRAME + 8 > cache.capacities.min():
            keep = []
            every = [np.ones((cache.kv_heads, int(rows)), np.bool_) for rows in cache.lengths]
            recent = [cache.frame(layer) == cache.frame(layer).max() for layer in range(cache.layers)]
            scores = kernels.infinipot_scores(cache, recent, every)
            for layer, valid in enumerate(every):
                patch = cache.row(layer), cache.col(layer)
                similar, norms = scores[layer]
                pooled = kernels.pool_norms(norms, cache.frame(layer), *patch, valid, 3)
                keep.append(kernels.top_k(pooled - similar, cache.seq(layer), valid, 60))
            cache.evict(keep)
        if turn % 7 == 0:
            position = cache.reindex(0)
            cache.shift(0, cache.position(0) + np.int32(1))
            position += 1
        new = kit.rows(FRAME, turn * FRAME, per_frame=FRAME, width=4)
        new.position[:, 0] = position + np.arange(FRAME)
        position += FRAME
        cache.reserve(FRAME)
        kit.write(cache, FRAME, rng)
        cache.commit(new)
        mark = cache.mark()
        cache.reserve(3)
        cache.abort()
        kit.append(cache, 3, rng=rng)
        cache.rollback(mark)


def test_1000_rounds_allocate_nothing(kit):
    cache, rng = kit.make(layers=3, kv_heads=2, head_dim=16, capacity=128), np.random.default_rng(0)
    run(kit, cache, 100, 0, rng)
    loose = _native.loose_allocations()
    watched = platform.libc_ver()[0] == "glibc" and not kit.sanitized and hasattr(ctypes.CDLL(None), "mallinfo2")
    before = malloc_in_use() if watched else 0
    run(kit, cache, ROUNDS, 100, rng)
    assert cache.allocations == 1
    assert _native.loose_allocations() == loose
    assert cache.nbytes == cache.memory.nbytes
    if watched:
        growth = malloc_in_use() - before
        print(f"malloc grew by {growth} bytes in {ROUNDS} rounds")
        assert growth < 64 * ROUNDS  # a block lost each round would be more: see below
    else:
        pytest.skip("the hook is constant; mallinfo2 is not to be had here")
