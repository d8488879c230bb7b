"""Long loops run without the GIL, kernels take turns in a cache's scratch, and what one thread changes no other touches."""

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels

pytestmark = pytest.mark.cpu


def scores(cache):
    valid = np.ones((cache.kv_heads, int(cache.lengths[0])), np.bool_)
    recent = cache.frame(0) == cache.frame(0).max()
    patch = cache.row(0), cache.col(0)
    turned = recent, valid, cache.inv_freq
    similar = kernels.temporal_similarity(cache.key(0), cache.position(0), *patch, *turned, scale=cache.key_scale(0))
    norms = kernels.value_norms(cache.value(0), cache.value_scale(0))
    pooled = kernels.pool_norms(norms, cache.frame(0), *patch, valid, 3)
    return similar, pooled, kernels.top_k(pooled, cache.seq(0), valid, 9)


def test_threads_take_turns_in_the_scratch_of_one_cache(kit):
    cache = kit.make(layers=1, capacity=2048, head_dim=32)
    kit.append(cache, 2000)
    expected, found = scores(cache), []
    threads = [threading.Thread(target=lambda: found.extend(scores(cache) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for result in found:
        for array, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


@pytest.fixture(scope="module")
def large(kit):
    n = 400_000
    cache = kit.make(layers=1, kv_heads=1, head_dim=32, capacity=n)
    kit.append(cache, n, per_frame=196, width=14)
    return cache


@pytest.mark.parametrize("use", [lambda cache: cache.lengths, lambda cache: cache.seq(0), lambda cache: cache.reindex(0)])
def test_a_cache_that_is_being_changed_refuses_other_threads(large, use):
    places, over = (
        np.random.default_rng(0).integers(0, 30_000, (1, int(large.lengths[0]), 1), dtype=np.int32),
        threading.Event(),
    )

    def change():
        for way in itertools.cycle([1, -1]):
            with contextlib.suppress(CacheError):  # the other one's turn
                large.shift(0, places[:, ::way])
            if over.is_set():
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with pytest.raises(CacheError, match="the cache is in use by another thread"):
            until_refused(use, large)
    finally:
        over.set()
        thread.join()
    use(large)


def until_refused(use, cache):
    while True:
        use(cache)
        time.sleep(0.0002)


@pytest.mark.parametrize("kernel", ["temporal_similarity", "value_norms", "pool_norms", "top_k", "shift", "reindex"])
def test_other_threads_run_meanwhile(large, kernel):
    n = int(large.lengths[0])
    valid, patch = np.ones((1, n), np.bool_), (large.row(0), large.col(0))
    norms = np.random.default_rng(0).random((1, n), np.float32)
    recent = large.frame(0) > large.frame(0).max() // 2
    places = np.random.default_rng(0).integers(0, 30_000, (1, n, 1), dtype=np.int32)
    turns = itertools.count()
    work = {
        "temporal_similarity": lambda: kernels.temporal_similarity(
            large.key(0), large.position(0), *patch, recent, valid, large.inv_freq, scale=large.key_scale(0)
        ),
        "value_norms": lambda: kernels.value_norms(*repeated(large.value(0), large.value_scale(0))),
        "pool_norms": lambda: kernels.pool_norms(norms, large.frame(0), *patch, valid, 7),
        "top_k": lambda: kernels.top_k(np.broadcast_to(norms, (4, n)), *many(large.seq(0), valid), n // 2),
        "shift": lambda: large.shift(0, places[:, :: (-1) ** next(turns)]),
        "reindex": lambda: large.reindex(next(turns)),
    }[kernel]
    # A busy machine may starve us in one try; a kernel that held the GIL would in every one.
    assert any(runs_beside(work) for _ in range(200))


def runs_beside(work):
    """Whether this thread ran in the middle half of the time that another spent in ``work``."""
    span, ticks = [], []

    def timed():
        span.append(time.perf_counter())
        work()
        span.append(time.perf_counter())

    thread = threading.Thread(target=timed)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0002)
    begin, end = span
    quarter = (end - begin) / 4
    return any(begin + quarter < tick < end - quarter for tick in ticks)


def repeated(value, scale):
    """Four heads of the one there is."""
    return many(value)[0], None if scale is None else many(scale)[0]


def many(*arrays):
    return [np.broadcast_to(array, (4, *array.shape[1:])) for array in arrays]
