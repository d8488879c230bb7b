"""Blocks for tests of stores, and what to ask of them."""

import time

import numpy as np

from edgevlm.runtime.store import Block

ARRAYS = Block.__slots__


def block(seed, rows=256, heads=1, head_dim=32, dtype=np.float32, axes=1):
    """Numbers that no other seed has. With the defaults its record has 70,720 bytes."""
    rng = np.random.default_rng(seed)

    def whole(kind, *more):
        return rng.integers(0, 100, (heads, rows, *more)).astype(kind)

    key, value = (whole(dtype, head_dim) if dtype == np.int8 else whole(dtype, head_dim) / 7 for _ in range(2))
    return Block(
        key.astype(dtype),
        value.astype(dtype),
        whole(np.int64),
        whole(np.int32),
        whole(np.int16),
        whole(np.int16),
        whole(np.int32, axes),
    )


def same(found, wanted):
    """Whether two blocks, or Nones, are equal to the bit and in dtype."""
    if found is None or wanted is None:
        return found is wanted
    pairs = [(getattr(found, name), getattr(wanted, name)) for name in ARRAYS]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def until(done):
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)
