"""How often the rows of a cluster are written again as it grows, and that none gets lost on the way."""

import numpy as np

from edgevlm.runtime.retrieval.chains import LINKS, Link, shortened
from edgevlm.runtime.store import Block, HostStore
from edgevlm.runtime.store.block import joined


def block(seqs):
    n = len(seqs)
    rows = np.zeros((1, n), np.int16)
    wide = np.zeros((1, n, 4), np.float32)
    return Block(wide, wide, np.array([seqs], np.int64), np.zeros((1, n), np.int32), rows, rows, np.zeros((1, n, 1), np.int32))


class Counting(HostStore):
    """Counts the rows that a store of records would write: of an append those, and all of them for each fourth."""

    def __init__(self):
        super().__init__()
        self.written, self.appends = 0, {}

    def put(self, block):
        self.written += len(block)
        return super().put(block)

    def append(self, number, block):
        there = super().append(number, block)
        self.appends[number] = self.appends.get(number, 0) + 1
        self.written += len(self.get([number])[0]) if self.appends[number] % 4 == 0 else len(block)
        return there


def test_rows_are_written_again_a_few_times_however_large_the_cluster():
    store, links, count, random = Counting(), [], 0, np.random.default_rng(0)
    for _ in range(2000):
        new = int(random.integers(1, 12))
        links.append(Link(new, block=block(range(count, count + new))))
        count += new
        assert shortened(store, links) == 0
        assert len(links) <= LINKS
    held = joined(store.get([link.number for link in links]))
    assert sorted(held.seq[0].tolist()) == list(range(count))
    assert [link.rows for link in links] == [len(each) for each in store.get([link.number for link in links])]
    assert store.written < 12 * count, "with the two smallest joined it would be 60 times"
