"""Where records go: never over one that is thought to be there, and always over the oldest."""

import numpy as np
import pytest

from edgevlm.runtime.store.file import START
from edgevlm.runtime.store.ring import Ring


@pytest.mark.parametrize("seed", range(4))
def test_it_overwrites_the_oldest_and_nothing_else(seed):
    rng, ring, limit = np.random.default_rng(seed), Ring(START + 6400 + 40), START + 6400
    there = {}  # number: (offset, end), oldest first
    for number in range(400):
        nbytes = 64 * int(rng.integers(1, 12))
        ring.blocks.add(number)
        ahead, (extent, gone) = ring.ahead(nbytes), ring.place(nbytes)
        assert ahead == gone
        start, end = extent.offset, extent.offset + nbytes
        assert START <= start < end <= limit
        for lost in gone:
            there.pop(lost)
        assert all(last <= start or end <= first for first, last in there.values())
        ages = list(there)
        assert gone == sorted(gone)
        assert not gone or not ages or gone[-1] < ages[0]
        ring.written(number, extent)
        there[number] = (start, end)
        if rng.random() < 0.2:
            dropped = int(rng.choice(list(there)))
            ring.remove(dropped)
            del there[dropped]
        assert ring.live == sum(last - first for first, last in there.values())
    assert ring.blocks.ids().tolist() == sorted(there)
    assert all((e.offset, e.offset + e.nbytes) == there[number] for number in there for e in ring.extents(number))
    assert sum(last - first for first, last in there.values()) > 3200, "most of the ring is in use"


def test_what_is_larger_than_the_ring_has_no_place():
    assert Ring(START + 640).place(704) is None


def test_a_write_that_failed_is_tried_again_at_the_same_place():
    ring = Ring(START + 640)
    ring.blocks.add(0)
    (first, _), (again, _) = ring.place(320), ring.place(320)
    assert first.offset == again.offset
    assert first.stamp != again.stamp


def test_its_tables_grow_with_what_is_there():
    """Also where the oldest block stays, so that none of the records after it have left."""
    ring = Ring(1 << 40)
    for number in range(3000):
        ring.blocks.add(number)
        for _ in range(2):
            ring.written(number, ring.place(64)[0])
        if number > 20:
            ring.remove(number - 20)
    assert ring.blocks.ids().tolist() == [0, *range(2980, 3000)]
    assert [e.offset for number in (0, 2990) for e in ring.extents(number)] == [START + 64 * at for at in (0, 1, 5980, 5981)]
    assert ring.nbytes < 20_000
