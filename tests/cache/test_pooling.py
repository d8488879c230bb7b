"""Threads: the same bits whatever their number, nothing allocated once they run, and no harm in fork or exit."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edgevlm.runtime import kernels

pytestmark = pytest.mark.cpu


@pytest.fixture
def threads():
    yield kernels.set_threads
    kernels.set_threads(1)


def everything(kit):
    """One pass over a cache of several layers: all that kernels compute and all that is left in the cache."""
    cache = kit.make(layers=5, kv_heads=3, head_dim=16, capacity=[200, 210, 220, 230, 240])
    kit.append(cache, 200, rng=np.random.default_rng(3), per_frame=16, width=4)
    valid = [np.ones((3, 200), np.bool_)] * 5
    recent = [kernels.newest_frames(cache.frame(layer), valid[0], 2) for layer in range(5)]
    scores = kernels.infinipot_scores(cache, recent, valid)
    query = np.random.default_rng(4).standard_normal((6, 9, 16), np.float32)
    kept = [array for pair in scores for array in pair]
    kept.append(kernels.attention_mass(query, np.arange(191, 200), cache.key(1), cache.seq(1), scale=cache.key_scale(1)))
    kept.append(kernels.newer_similarity(cache, 1, valid[1]))
    keep = []
    for layer, (similarity, norms) in enumerate(scores):
        pooled = kernels.pool_norms(norms, cache.frame(layer), cache.row(layer), cache.col(layer), valid[layer], 3)
        keep.append(kernels.top_k(pooled - similarity, cache.seq(layer), valid[layer], 120 + layer))
        kept += [pooled, keep[-1]]
    kept += [cache.evict(keep), cache.rows_moved, cache.reindex(3)]
    cache.shift(2, cache.position(2) + np.int32(5))
    for layer in range(5):
        kept += kit.arrays(cache, layer).values()
    return kept


@pytest.mark.parametrize("count", [2, 3, 16])
def test_results_do_not_depend_on_the_number_of_threads(kit, threads, count):
    expected = everything(kit)
    threads(count)
    assert kernels.threads() == count
    for _ in range(20):
        for found, wanted in zip(everything(kit), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_calls_from_several_python_threads_at_once(kit, threads):
    expected = everything(kit)
    threads(3)
    with ThreadPoolExecutor(4) as workers:
        for made in workers.map(lambda _: everything(kit), range(40)):
            for found, wanted in zip(made, expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


WORK = """
import numpy as np
from edgevlm.runtime import kernels

kernels.set_threads(4)
value = np.ones((64, 500, 32), np.float32)
assert (kernels.value_norms(value) == np.sqrt(np.float32(32))).all()
"""
FORK = """
import os
for _ in range(5):
    child = os.fork()
    if child == 0:
        assert (kernels.value_norms(value) == np.sqrt(np.float32(32))).all()  # with threads of its own
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    kernels.value_norms(value)
"""


@pytest.mark.parametrize("code", [WORK, WORK + FORK, WORK + "import sys; sys.exit(0)", WORK + "raise SystemExit"])
def test_a_process_with_threads_forks_and_ends(kit, code):
    if kit.sanitized:
        pytest.skip("the sanitizer slows a new process down")
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
