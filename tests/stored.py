"""Blocks for tests of stores, and what to ask of them."""

import time

import numpy as np

from edgevlm.runtime.store import Block, Store, StoreStats, joined

ARRAYS = Block.__slots__


def block(seed, rows=252, heads=1, head_dim=32, dtype=np.float32, axes=1):
    """Numbers that no other seed has. With the defaults its record has 70,656 bytes."""
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
        whole(np.int32),
    )


def same(found, wanted):
    """Whether two blocks, or Nones, are equal to the bit and in dtype."""
    if found is None or wanted is None:
        return found is wanted
    pairs = [(getattr(found, name), getattr(wanted, name)) for name in ARRAYS]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


class PlainStore(Store):
    """The reference: blocks in a dict, without a limit. It loses what it is told to, and notes what it is to read ahead."""

    file_bytes = index_bytes = host_limit = 0
    stats = None

    def __init__(self):
        self.stats, self._blocks, self._next, self._lost, self.prefetched = StoreStats(), {}, 0, [], []

    @property
    def host_bytes(self):
        return sum(block.nbytes for block in self._blocks.values())

    def put(self, block):
        self._blocks[self._next] = joined([block])
        self._next += 1
        return self._next - 1

    def append(self, number, block):
        if number not in self._blocks:
            return False
        self._blocks[number] = joined([self._blocks[number], block])
        return True

    def renumber(self, numbers):
        found = [block for number in numbers if (block := self._blocks.pop(int(number), None)) is not None]
        new = range(self._next, self._next + len(found))
        self._blocks |= zip(new, found, strict=True)
        self._next = new.stop
        return new

    def resident(self, number):
        return int(number) in self._blocks

    def prefetch(self, numbers):
        self.prefetched.append(list(numbers))

    def get(self, numbers):
        found = [self._blocks.get(int(number)) for number in numbers]
        here = [block for block in found if block is not None]
        self.stats.hits += len(here)
        self.stats.bytes_host += sum(block.nbytes for block in here)
        return found

    def drop(self, numbers):
        for number in numbers:
            self._blocks.pop(int(number), None)

    def lose(self, numbers):
        self.drop(numbers)
        self._lost += numbers
        self.stats.lost += len(numbers)

    def lost(self):
        lost, self._lost = self._lost, []
        return lost

    def state(self):
        return {"next": np.array(self._next), "numbers": np.array(sorted(self._blocks), np.int64)}

    def restore(self, state):
        self._blocks, self._next = {}, int(state["next"])
        self._lost = state["numbers"].tolist()
        self.stats.lost += len(self._lost)

    def sync(self):
        pass

    def close(self):
        self._blocks = {}


def until(done):
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)
