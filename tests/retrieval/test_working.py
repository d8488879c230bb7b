"""The working set beside the plainest account of what each KV head attends to."""

import numpy as np
import pytest
from policies.filled import HEADS, PREFIX, STORAGE, Filled, turned
from stored import PlainStore

from edgevlm.runtime.engine import arrays_of
from edgevlm.runtime.policies.retrieval import block_of
from edgevlm.runtime.retrieval.working_set import WorkingSet

GRID, FRAMES, ROWS = (2, 2), 6, 9


class Below:
    """A cache of one layer whose frames are all below too, one block each, and a working set over them."""

    def __init__(self, dtype="fp32", axes=1, rows=ROWS):
        self.filled = Filled(1, 4 * FRAMES + rows + 8, GRID, np.random.default_rng(3), dtype, axes)
        for _ in range(FRAMES):
            self.filled.frame()
        self.cache, self.store = self.filled.cache, PlainStore()
        self.memory = arrays_of(self.cache.buffers()[0])
        rows_of = [np.flatnonzero(self.cache.frame(0)[0] == frame) for frame in range(FRAMES)]
        self.blocks = [block_of(self.cache, 0, np.stack([of] * HEADS)) for of in rows_of]
        self.numbers = [self.store.put(block) for block in self.blocks]
        self.set = WorkingSet(self.cache, self.store, rows, PREFIX)

    def turned(self, block, scale):
        """The un-rotated keys of head 0, in float64."""
        position = block.position[0] if self.cache.axes > 1 else block.position[0, :, 0]
        return turned(block.key[0].astype(np.float64) * (1 if scale is None else scale[0]), -position)

    def attended(self, head, after=0):
        """Keys and values of the working set of a head, which stands ``after`` rows behind the valid ones."""
        start = int(self.cache.lengths[0]) + after
        end = start + int(self.set.held[0, head])
        return self.memory[0][head, start:end].copy(), self.memory[1][head, start:end].copy()


@pytest.fixture(params=STORAGE, ids=lambda storage: f"{storage[0]}-{storage[1]}")
def below(request):
    return Below(*request.param)


def test_each_head_gets_its_own_blocks_as_they_were_stored(below):
    chosen = [[below.numbers[4], below.numbers[1]], [below.numbers[2]]]
    assert below.set.load(0, chosen).tolist() == [8, 4]
    for head, frames in enumerate(([4, 1], [2])):
        key, value = below.attended(head)
        np.testing.assert_array_equal(key, np.concatenate([below.blocks[frame].key[head] for frame in frames]))
        np.testing.assert_array_equal(value, np.concatenate([below.blocks[frame].value[head] for frame in frames]))


@pytest.mark.parametrize("appended", [1, 4, 7])
def test_new_rows_change_places_with_the_working_set(below, appended):
    """7 rows are more than head 1 has fetched, 4 as many, 1 fewer."""
    below.set.load(0, [[below.numbers[5], below.numbers[0]], [below.numbers[3]]])
    before, start = [below.attended(head) for head in range(HEADS)], int(below.cache.lengths[0])
    below.cache.reserve(appended)
    new = []
    for head, held in enumerate(below.set.held[0]):
        for part in below.memory:
            part[head, start + held : start + held + appended] = np.arange(appended)[:, None] + 10 * head
        new.append(below.memory[0][head, start + held : start + held + appended].copy())
    below.set.settle(0, appended)
    for head in range(HEADS):
        for part, fetched in enumerate(before[head]):
            np.testing.assert_array_equal(below.memory[part][head, start : start + appended], new[head])
            got = below.attended(head, appended)[part]
            order = np.lexsort(got.T), np.lexsort(fetched.T)
            np.testing.assert_array_equal(got[order[0]], fetched[order[1]])


def test_a_set_that_stands_already_is_not_fetched_again(below):
    chosen = [[below.numbers[1]], [below.numbers[2]]]
    below.set.load(0, chosen)
    moved = below.store.stats.bytes_host
    below.set.load(0, chosen)
    assert below.store.stats.bytes_host == moved
    below.set.forget()
    below.set.load(0, chosen)
    assert below.store.stats.bytes_host == 2 * moved


def test_contiguous_positions_follow_time_behind_the_prefix(below):
    """Whatever the order of the blocks; on three axes as one video of just these frames."""
    axes = below.cache.axes
    below.set.contiguous = True
    below.set.load(0, [[below.numbers[5], below.numbers[2]], [below.numbers[4]]])
    patch = np.array([(frame, row, col) for frame in (1, 0) for row in range(2) for col in range(2)])
    place = PREFIX + (np.r_[4:8, 0:4] if axes == 1 else patch)
    scale = below.cache.key_scale(0)
    wanted = np.concatenate([below.turned(below.blocks[frame], scale) for frame in (5, 2)])
    key = below.attended(0)[0].astype(np.float64) * (1 if scale is None else scale[0])
    tolerance = {"float32": 1e-5, "float16": 4e-3, "int8": 0.04}[below.cache.dtype.name]
    np.testing.assert_allclose(key, turned(wanted, place), atol=tolerance)
    np.testing.assert_array_equal(below.attended(0)[1], np.concatenate([below.blocks[f].value[0] for f in (5, 2)]))


def test_a_lost_block_is_left_out(below):
    below.store.drop([below.numbers[1]])
    assert below.set.load(0, [[below.numbers[1], below.numbers[2]], []]).tolist() == [4, 0]
