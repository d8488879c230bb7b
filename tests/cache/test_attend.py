"""Attention over the cache's memory against its float64 twin."""

import sys

import numpy as np
import pytest
import reference

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.kv import codes

pytestmark = pytest.mark.usefixtures("isa")


def case(rng):
    """Random arguments of one call: shapes, lengths from 0 to capacity, dtypes, lists, bias, patterns, frames, windows."""
    heads, group, width = rng.integers(1, 4), rng.integers(1, 9), rng.choice([1, 4, 16, 24, 64, 80, 128])
    rows = int(rng.choice([0, 1, 1, 2, 7, 40, 70]))
    capacity = rows + int(rng.choice([0, 1, 30, 200, 2500]))
    dtype = rng.choice([np.float32, np.float16, np.int8])
    held = rng.integers(0, capacity - rows + 1, heads).astype(np.int32)
    memory = rng.standard_normal((2, heads, capacity, width)).astype(np.float32)
    scales = rng.uniform(0.02, 0.05, (2, heads, width)).astype(np.float32) if dtype == np.int8 else (None, None)
    memory = [part.astype(dtype) if scale is None else codes(part, scale) for part, scale in zip(memory, scales, strict=True)]
    query = np.float32(rng.choice([0, 1, 4])) * rng.standard_normal((rows, heads * group * width), np.float32)
    new = rng.standard_normal((2, rows, heads * width), np.float32)
    options = {"threads": int(rng.integers(1, 4))}
    if rng.integers(2):
        options["bias"] = rng.standard_normal((heads, capacity), np.float32)
    which = rng.integers(3)
    if which == 1:
        options["rows"] = [rng.permutation(n)[: rng.integers(0, n + 1)].astype(np.int32) for n in held]
    elif which == 2 and rows:
        frame = rng.choice([size for size in range(1, rows + 1) if rows % size == 0])
        options["previous"] = np.stack([rng.integers(-1, n, frame) for n in held])
        options["shared"] = int(rng.integers(0, held.min() + 1))
    if which < 2 and rows and rng.integers(2):  # frames of some rows, which see one another
        ends = np.unique([*rng.integers(1, rows + 1, rng.choice([0, 2, rows // 3])), rows])
        options["until"] = ends[np.searchsorted(ends, np.arange(rows), "right")].astype(np.int32)
        if rng.integers(2):
            options["window"] = int(rng.integers(1, capacity + 2))
            options["place"] = np.sort(rng.integers(0, capacity, rows)).astype(np.int32)
            positions = rng.integers(0, capacity, (heads, int(held.max()))).astype(np.int32)
            options["position"] = np.sort(positions) if rng.integers(2) else positions
    return [query, *new, *memory, held, *scales], options


def check(arguments, options):
    query, key, value, *memory, held, key_scale, value_scale = arguments
    before, (heads, _, width) = [part.copy() for part in memory], memory[0].shape
    threads = options.pop("threads")
    found = kernels.attend(*arguments, threads=threads, **options)
    numbers = []
    for new, part, old, scale in zip((key, value), memory, before, (key_scale, value_scale), strict=True):
        by_head = new.reshape(len(new), heads, width).transpose(1, 0, 2)
        for head, first in enumerate(held):
            old[head, first : first + len(new)] = by_head[head] if scale is None else codes(by_head, scale)[head]
        np.testing.assert_array_equal(part, old)  # appended, and nothing else is touched
        numbers.append(part.astype(np.float64) if scale is None else part * scale[:, None].astype(np.float64))
    expected = reference.attend(query, key, value, *numbers, held, **options)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max(initial=0) <= 1e-5 * max(1, np.abs(expected).max(initial=0))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_it_equals_the_reference(seed):
    source = np.random.default_rng(seed)
    for _ in range(75):
        check(*case(source))


@pytest.mark.parametrize(("rows", "held"), [(1, 6000), (300, 700)])
def test_the_same_bits_with_any_number_of_threads(rows, held):
    rng = np.random.default_rng(0)
    memory = rng.standard_normal((2, 2, held + rows, 64), np.float32)
    query, new = rng.standard_normal((rows, 14 * 64), np.float32), rng.standard_normal((rows, 128), np.float32)
    before, found = kernels.threads(), []
    try:
        for threads in (1, 2, 5):
            kernels.set_threads(threads)
            found.append(kernels.attend(query, new, new, *memory, np.full(2, held, np.int32)))
    finally:
        kernels.set_threads(before)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


WRONG = {
    "do not fit": {"held": np.array([4], np.int32)},
    "below held": {"rows": [np.array([3], np.int32)]},
    "a list for each": {"rows": []},
    "held rows, or -1": {"previous": np.array([[3, 0]])},
    "whole frames": {"previous": np.zeros((1, 3), np.int64)},
    "shared must be 0 to 3": {"previous": np.zeros((1, 2), np.int64), "shared": 4},
    "int8 requires a scale": {"key_scale": np.ones((1, 8), np.float32)},
    "window must be": {"window": -1},
    "multiple of": {"query": np.zeros((2, 12), np.float32)},
    "writeable": {"keys": np.broadcast_to(np.float32(0), (1, 5, 8))},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_call_changes_nothing(message):
    keys, values = np.zeros((2, 1, 5, 8), np.float32)
    rows = np.ones((2, 8), np.float32)
    given = {"query": rows, "key": rows, "value": rows, "keys": keys, "values": values, "held": np.array([3], np.int32)}
    with pytest.raises(CacheError, match=message):
        kernels.attend(**(given | WRONG[message]))
    assert not keys.any()
    assert not values.any()


if __name__ == "__main__":  # python tests/cache/test_attend.py SEED CASES
    source = np.random.default_rng(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        check(*case(source))
    print(f"{sys.argv[2]} cases equal the reference")
