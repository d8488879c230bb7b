"""Every misuse is a CacheError that says what is wrong, before a byte is changed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import _native, kernels
from edgevlm.runtime.cache import Rows
from edgevlm.runtime.policies.resv import HashClusters

pytestmark = pytest.mark.once


def rows(kit, **change):
    good = kit.rows(2, 6)
    return Rows(**{name: change.get(name, getattr(good, name)) for name in Rows.__slots__})


KEEP = np.ones((2, 6), np.bool_)
NEW = np.ones((2, 2, 8), np.float32)

RESERVED = {
    "reserve twice": (lambda kit, c: c.reserve(1), "cannot reserve while 2 rows are reserved"),
    "mark": (lambda kit, c: c.mark(), "cannot mark while"),
    "evict": (lambda kit, c: c.evict([None, None]), "cannot evict while"),
    "shift": (lambda kit, c: c.shift(0, c.position(0) + 1), "cannot shift while"),
    "reindex": (lambda kit, c: c.reindex(0), "cannot reindex while"),
    "append": (lambda kit, c: c.append(0, NEW, NEW, kit.rows(2)), "cannot append while"),
    "too few rows": (lambda kit, c: c.commit(kit.rows(1)), "2 rows are reserved, but 1 were committed"),
    "kind unknown": (lambda kit, c: c.commit(rows(kit, kind=np.array([1, 99], np.uint8))), r"kind must be 0\.\.3, not 99"),
    "seq dtype": (lambda kit, c: c.commit(rows(kit, seq=np.ones(2, np.int32))), "seq must be int64, not int32"),
    "row a list": (lambda kit, c: c.commit(rows(kit, row=[0, 0])), r"row must be a numpy array of int16 \[2\]"),
    "position negative": (
        lambda kit, c: c.commit(rows(kit, position=np.array([[0], [-1]], np.int32))),
        "must not be negative: row 1 has -1",
    ),
}
SETTLED = {
    "commit": (lambda kit, c: c.commit(kit.rows(2)), "nothing is reserved"),
    "abort": (lambda kit, c: c.abort(), "nothing is reserved"),
    "reserve less than none": (lambda kit, c: c.reserve(-1), "cannot reserve -1 rows"),
    "one mask short": (lambda kit, c: c.evict([KEEP]), "each of the 2 layers, not 1"),
    "mask shape": (lambda kit, c: c.evict([None, KEEP[:, :5]]), r"mask of layer 1 must be \[2, 6\], not \[2, 5\]"),
    "layer too high": (lambda kit, c: c.key(2), r"no layer 2: the cache has layers 0\.\.1"),
    "shift negative": (lambda kit, c: c.shift(0, c.position(0) - np.int32(3)), "not be negative: head 0, row 0"),
    "shift by its own": (lambda kit, c: c.shift(0, c.position(0)[:, ::-1]), "position overlaps memory that the call changes"),
    "load its own": (lambda kit, c: c.load(0, c.held(1)), "kind overlaps memory that the call changes"),
    "reindex prefix": (lambda kit, c: c.reindex(-1), "prefix cannot be -1"),
}


@pytest.mark.parametrize("name", RESERVED)
def test_with_rows_reserved(kit, name):
    misuse, message = RESERVED[name]
    cache = kit.make()
    kit.append(cache, 6)
    cache.reserve(2)
    before = cache.memory.copy()
    with pytest.raises(CacheError, match=message):
        misuse(kit, cache)
    np.testing.assert_array_equal(cache.memory, before)
    cache.commit(kit.rows(2, 6))  # the reservation still stands
    assert cache.lengths.tolist() == [8, 8]


@pytest.mark.parametrize("name", SETTLED)
def test_with_nothing_reserved(kit, name):
    misuse, message = SETTLED[name]
    cache = kit.make()
    kit.append(cache, 6)
    before, mark = cache.memory.copy(), cache.mark()
    with pytest.raises(CacheError, match=message):
        misuse(kit, cache)
    np.testing.assert_array_equal(cache.memory, before)
    cache.rollback(mark)
    kit.append(cache, 2, start=6)
    assert cache.lengths.tolist() == [8, 8]


def test_rollback_with_rows_reserved(kit):
    cache = kit.make()
    mark = cache.mark()
    cache.reserve(2)
    with pytest.raises(CacheError, match="cannot roll back while"):
        cache.rollback(mark)


def test_an_unaligned_array_is_refused(kit):
    cache = kit.make()
    kit.append(cache, 6)
    odd = np.frombuffer(bytearray(2 * 6 * 4 + 1), np.uint8)[1:].view(np.int32).reshape(2, 6, 1)
    with pytest.raises(CacheError, match="position must be aligned"):
        cache.shift(0, odd)


@pytest.mark.parametrize("capacity", [2.5, [1.9, 2.9], np.array([3.0, 4.0]), True, ["8", "8"]])
def test_a_capacity_is_whole_rows(kit, capacity):
    with pytest.raises(CacheError, match="must be integers"):
        kit.make(capacity=capacity)


@pytest.mark.cpu
def test_a_position_has_axes(kit):
    cache = kit.make()
    kit.append(cache, 6)
    mask, nowhere = np.ones((2, 6), np.bool_), np.zeros((2, 6, 0), np.int32)
    tokens = cache.key(0), nowhere, cache.row(0), cache.col(0), mask, mask, cache.inv_freq
    with pytest.raises(CacheError, match="a position has 1 or 3 axes, not 0"):
        kernels.temporal_similarity(*tokens, rotated=True, scale=cache.key_scale(0))


def full_of(open_slots):
    clusters = HashClusters(layers=1, kv_heads=1, head_dim=4, axes=1, slots=4)
    clusters.count[:], clusters.open[..., :open_slots] = 1, True
    return clusters


FIVE = np.ones((1, 5, 4), np.float32), np.zeros((1, 5, 1), np.float32)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: full_of(0).join(0, *FIVE, 0), "head 0 has no free slot among 4"),
        (lambda: full_of(1).seal(0, *FIVE, np.zeros((1, 5), np.int32), np.ones((1, 5), np.bool_)), "no free slot"),
        (lambda: dropped(full_of(3)).join(0, *FIVE, 0), "head 0 has 3 open clusters in 4 slots: half at most"),
        (
            lambda: dropped(full_of(1)).seal(0, *FIVE, np.zeros((1, 5), np.int32), np.ones((1, 5), np.bool_)),
            "more tokens leave slot 0 of head 0 than its open cluster has",
        ),
    ],
)
def test_clusters_are_at_rest(misuse, message):
    with pytest.raises(CacheError, match=message):
        misuse()


def dropped(clusters):
    clusters.count[..., -1] = 0
    return clusters


@pytest.mark.cpu
def test_an_object_that_was_never_made_is_no_cache():
    for method in (_native.Cache.mark, _native.Cache.lengths.fget, _native.read):
        with pytest.raises(TypeError):
            method(_native.Cache.__new__(_native.Cache))


@pytest.mark.cpu
def test_generated_misuse_kills_nothing():
    """Some of what ``python tests/fuzz/misuse.py`` does by the thousand."""
    script = Path(__file__).parents[1] / "fuzz" / "misuse.py"
    done = subprocess.run([sys.executable, script, "200"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
