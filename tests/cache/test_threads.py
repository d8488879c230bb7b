"""Long loops run without the GIL, kernels take turns in a cache's scratch, and what one thread changes no other touches."""

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import _native, kernels
from edgevlm.runtime.policies.resv import HashClusters

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def large(kit):
    n = 400_000
    cache = kit.make(layers=1, kv_heads=1, head_dim=32, capacity=n)
    kit.append(cache, n, per_frame=196, width=14)
    return cache


@pytest.mark.parametrize("use", [lambda cache: cache.lengths, lambda cache: cache.seq(0), lambda cache: cache.reindex(0)])
def test_a_cache_that_is_being_changed_refuses_other_threads(large, use):
    places = np.random.default_rng(0).integers(0, 30_000, (1, int(large.lengths[0]), 1), dtype=np.int32)
    turns = itertools.cycle([1, -1])
    with (
        again_and_again(lambda: large.shift(0, places[:, :: next(turns)])),
        pytest.raises(CacheError, match="the cache is in use by another thread"),
    ):
        until_refused(use, large)
    use(large)


@pytest.mark.parametrize("call", ["hash_join", "wicsum", "mosaic_assign"])
def test_clusters_that_are_being_changed_refuse_other_threads(call):
    random, clusters = np.random.default_rng(0), HashClusters(1, 1, 32, 1, slots=1024)
    keys, places = random.standard_normal((1, 5000, 32), np.float32), np.zeros((1, 5000, 1), np.float32)
    mosaic = np.zeros(1024), np.zeros(1024, np.int64), np.full(1024, -1, np.int32), 0.0, 0.0, 1.0, 1 << 40
    slot, partition = np.zeros(1, np.int32), np.zeros(1, np.int32)
    use = {
        "hash_join": lambda held: held.join(0, keys[:, :1], places[:, :1], 7),
        "wicsum": lambda held: held.choose(0, keys[:, :1], 0.5),
        "mosaic_assign": lambda held: _native.mosaic_assign(keys[0, :1], partition, 0, held.key[0, 0], *mosaic, slot),
    }[call]
    with (
        again_and_again(lambda: clusters.join(0, keys, places, 7)),
        pytest.raises(CacheError, match="is in use by another thread"),
    ):
        until_refused(use, clusters)
    use(clusters)


@contextlib.contextmanager
def again_and_again(change):
    """Another thread does ``change`` until the block ends."""
    over = threading.Event()

    def work():
        while not over.is_set():
            with contextlib.suppress(CacheError):  # the other one's turn
                change()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def until_refused(use, what):
    while True:
        use(what)
        time.sleep(0.0002)


@pytest.mark.parametrize("kernel", ["infinipot_scores", "top_k", "shift", "reindex"])
def test_other_threads_run_meanwhile(large, kernel):
    n = int(large.lengths[0])
    valid = np.ones((1, n), np.bool_)
    norms = np.random.default_rng(0).random((1, n), np.float32)
    recent = large.frame(0) > large.frame(0).max() // 2
    places = np.random.default_rng(0).integers(0, 30_000, (1, n, 1), dtype=np.int32)
    turns = itertools.count()
    work = {
        "infinipot_scores": lambda: kernels.infinipot_scores(large, [recent] * large.layers, [valid] * large.layers),
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


def many(*arrays):
    return [np.broadcast_to(array, (4, *array.shape[1:])) for array in arrays]
