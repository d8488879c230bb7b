"""The runs of pages that a cluster has: none of its rows gets lost as it grows, few are written again, few are read."""

import numpy as np
import pytest
from stored import PlainStore

from edgevlm.runtime.retrieval import cluster_pages
from edgevlm.runtime.retrieval.cluster_pages import PAGE_ROWS, ClusterPages
from edgevlm.runtime.store import Block, Store, StoreSettings, joined


def block(seqs):
    n = len(seqs)
    rows = np.zeros((1, n), np.int16)
    wide = np.zeros((1, n, 4), np.float32)
    frame = np.zeros((1, n), np.int32)
    return Block(wide, wide, np.array([seqs], np.int64), frame, rows, rows, frame[..., None], frame)


class Pages(PlainStore):
    largest = 0

    def put(self, block):
        self.largest = max(self.largest, len(block))
        return super().put(block)

    @property
    def seqs(self):
        return {int(seq) for block in self._blocks.values() for seq in block.seq[0]}


@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize("seed", range(2))
def test_clusters_that_grow_merge_and_lose_pages_are_a_dict_of_sets(monkeypatch, page, seed):
    monkeypatch.setattr(cluster_pages, "PAGE_ROWS", page)
    random, store, slots, count = np.random.default_rng(seed), Pages(), 6, 0
    of = ClusterPages(1, 1, slots)
    held = {slot: set() for slot in range(slots)}
    for turn in range(200):
        home = np.where(of.held(0)[0] > 0, np.arange(slots), -1).astype(np.int32)
        if turn % 13 == 12 and (home >= 0).sum() > 1:
            into, gone = random.permutation(np.flatnonzero(home >= 0))[:2].tolist()
            home[gone] = into
            held[into] |= held[gone]
            held[gone] = set()
        parts = {}
        for slot in np.unique(random.integers(slots, size=2)).tolist():
            new = int(random.integers(1, 40))
            parts[slot] = block(range(count, count + new))
            held[slot] |= set(range(count, count + new))
            count += new
        known = set().union(*held.values())
        if turn % 11 == 10:  # pages that are gone, and of which the index is told at once, or finds on its way
            gone = random.choice(sorted(store._blocks), size=min(3, len(store._blocks)), replace=False).tolist()
            rows = {int(seq) for each in store.get(gone) for seq in each.seq[0]}
            store.drop(gone)
            if turn % 2:
                of.mark_lost(gone)
            known -= rows
        of.update(store, 0, 0, home, parts)
        assert store.seqs == known, "whatever is not lost is kept"
        held = {slot: seqs & known for slot, seqs in held.items()}
        for slot in range(slots):
            numbers, left = of.blocks_of(0, 0, np.array([slot]), 10**9)
            found = {int(seq) for each in filter(None, store.get(numbers)) for seq in each.seq[0]}
            assert found == held[slot]
            assert left == 0
        assert of.held(0).sum() >= len(known)
    assert store.largest <= page
    assert max(map(len, held.values())) > 500


@pytest.mark.parametrize("room", [1, 63, 64, 65, 200, 1000, 5000])
def test_a_fetch_reads_no_more_pages_than_it_has_room_for(room):
    store, of = Pages(), ClusterPages(1, 1, 3)
    for slot, rows in ((0, 100), (1, 3000), (2, 500)):
        of.update(store, 0, 0, np.full(3, -1, np.int32), {slot: block(range(10_000 * slot, 10_000 * slot + rows))})
    numbers, left = of.blocks_of(0, 0, np.array([2, 1]), room)
    blocks = store.get(numbers)
    assert min(room, 3500) <= sum(map(len, blocks)) < room + 2 * PAGE_ROWS
    assert sum(map(len, blocks)) + left == 3500
    seqs = joined(blocks).seq[0]
    assert (seqs[:64] >= 20_000).all(), "of the first cluster first"
    if room == 1000:
        of_second = np.unique((seqs[seqs < 20_000] - 10_000) // PAGE_ROWS)
        assert (np.diff(of_second) > 1).any(), "not its oldest pages alone"
        assert of_second.max() > 40


def test_clusters_in_a_file_that_is_full_keep_account_of_what_is_lost(tmp_path):
    """Pages go one by one as the ring comes to them; what the index holds in the end is what can be read."""
    of, count, random = ClusterPages(1, 1, 5), 0, np.random.default_rng(3)
    store = Store(tmp_path / "store.bin", settings=StoreSettings(1_000_000, 1_000_000))
    for turn in range(700):
        of.mark_lost(store.lost())
        home = np.where(of.held(0)[0] > 0, np.arange(5), -1).astype(np.int32)
        slot, new = int(random.integers(5)), int(random.integers(1, 60))
        of.update(store, 0, 0, home, {slot: block(range(count, count + new))})
        count += new
        if turn % 50 == 49:
            store.state()  # all of it is written, and what that goes over is lost
            of.mark_lost(store.lost())
            numbers, _ = of.blocks_of(0, 0, np.arange(5), 10**9)
            found = [each for each in store.get(numbers) if each is not None]
            assert sum(map(len, found)) == of.held(0).sum()
            assert len({int(seq) for each in found for seq in each.seq[0]}) == of.held(0).sum()
    store.close()
    assert of.held(0).sum() < count - 1000
