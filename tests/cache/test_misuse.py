"""Every misuse is a CacheError that says what is wrong, before a byte is changed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import _native
from edgevlm.runtime.cache import Rows

pytestmark = pytest.mark.once


def rows(kit, **change):
    good = kit.rows(2, 6)
    return Rows(**{name: change.get(name, getattr(good, name)) for name in Rows.__slots__})


KEEP = np.ones((2, 6), np.bool_)

RESERVED = {
    "reserve twice": (lambda kit, c: c.reserve(1), "cannot reserve while 2 rows are reserved"),
    "evict": (lambda kit, c: c.evict([None, None]), "cannot evict while"),
    "too few rows": (lambda kit, c: c.commit(kit.rows(1)), "2 rows are reserved, but 1 were committed"),
    "kind unknown": (lambda kit, c: c.commit(rows(kit, kind=np.array([1, 99], np.uint8))), r"kind must be 0\.\.3, not 99"),
    "seq dtype": (lambda kit, c: c.commit(rows(kit, seq=np.ones(2, np.int32))), "seq must be int64, not int32"),
    "position negative": (
        lambda kit, c: c.commit(rows(kit, position=np.array([[0], [-1]], np.int32))),
        "must not be negative: row 1 has -1",
    ),
}
SETTLED = {
    "commit": (lambda kit, c: c.commit(kit.rows(2)), "nothing is reserved"),
    "mask shape": (lambda kit, c: c.evict([None, KEEP[:, :5]]), r"mask of layer 1 must be \[2, 6\], not \[2, 5\]"),
    "layer too high": (lambda kit, c: c.key(2), r"no layer 2: the cache has layers 0\.\.1"),
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


@pytest.mark.parametrize("capacity", [2.5, [1.9, 2.9], np.array([3.0, 4.0]), True, ["8", "8"]])
def test_a_capacity_is_whole_rows(kit, capacity):
    with pytest.raises(CacheError, match="must be integers"):
        kit.make(capacity=capacity)


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
