"""ReSV over a cache that frames are appended to, beside one account a layer and KV head in float64."""

from itertools import chain

import numpy as np
import pytest
from policies.filled import GROUP, HEADS, INV_FREQ, PAIR_AXIS, PREFIX, STORAGE, Filled, told
from policies.reference_resv import ReferenceClusters
from reference import rotate
from stored import PlainStore

from edgevlm.errors import UserError
from edgevlm.runtime.policies import StreamShape, create_policy, layers_of
from edgevlm.runtime.retrieval import cluster_pages
from edgevlm.runtime.store import joined

GRID, PER_FRAME, LAYERS = (2, 3), 6, 2
BUDGET = 20 * PER_FRAME


class Kept(PlainStore):
    """A snapshot finds all blocks again."""

    def restore(self, state):
        assert state["numbers"].tolist() == sorted(self._blocks)


class Watched:
    """A policy, its cache and store, and, with ``beside``, the references that are told of the same rows."""

    def __init__(self, settings="", budget=BUDGET, dtype="fp32", axes=1, beside=True):
        text = f"resv:index=0.4,window=0.3{settings}"
        self.policy, self.store = create_policy(text), Kept()
        self.policy.attach(budget, StreamShape(LAYERS, PER_FRAME, PREFIX))
        rows = self.policy.window_rows + self.policy.working_rows + PER_FRAME
        self.filled = Filled(LAYERS, rows, GRID, np.random.default_rng(0), dtype, axes)
        self.cache = self.filled.cache
        self.policy.open(self.cache, self.store)
        clusters, below = self.policy.clusters, self.policy.distance + 1
        self.references = [
            [ReferenceClusters(clusters.slots, clusters.planes[head], below) for head in range(HEADS)]
            for _ in range(LAYERS if beside else 0)
        ]
        self.rows, self.contiguous, self.middle = {}, False, self.policy._middle.astype(np.float64)

    def frames(self, count, reindex_at=()):
        for number in range(count):
            self.frame(reindex=number in reindex_at)

    def frame(self, reindex=False):
        plan = self.policy.before_append(self.cache, PER_FRAME, None)
        if plan is not None:
            for layer, keep in enumerate(plan.keep if self.references else []):
                self.leave(layer, self.cache.seq(layer)[0][~keep[0]].tolist())
            self.cache.evict(plan.keep)
        if reindex:
            self.filled.reindex()
            self.policy.compacted()
            if self.references:
                self.compacted()
        news = self.filled.frame()
        self.policy.after_append(layers_of(self.cache), told(self.policy, news))
        if self.references:
            self.join(news.seq.tolist())

    def held(self, layer, head):
        """Key and place of each row that the cache holds, by seq."""
        cache = self.cache
        key, place = cache.dequantize("key", layer)[head], cache.position(layer)[head].astype(np.float64)
        if cache.axes > 1:
            place[:, 1:] -= np.stack([cache.row(layer)[head], cache.col(layer)[head]], 1)
        return {int(seq): (key[at].astype(np.float64), place[at]) for at, seq in enumerate(cache.seq(layer)[head])}

    def join(self, seqs):
        for layer, head in np.ndindex(LAYERS, HEADS):
            held, stored = self.held(layer, head), self.cache.key(layer)[head]
            for seq in seqs:
                self.references[layer][head].join(seq, *held[seq])
                at = int(np.flatnonzero(self.cache.seq(layer)[head] == seq)[0])
                self.rows[layer, head, seq] = stored[at].copy()

    def leave(self, layer, seqs):
        for head, reference in enumerate(self.references[layer]):
            for cluster in reference.at.values() if self.contiguous else ():
                for seq in set(cluster.tokens) & set(seqs) if cluster.open else ():
                    cluster.tokens[seq] = self.turned(*cluster.tokens[seq])
            reference.seal(set(seqs))
            for at, seq in enumerate(self.cache.seq(layer)[head]):
                self.rows[layer, head, int(seq)] = self.cache.key(layer)[head, at].copy()

    def turned(self, key, place):
        by = self.middle - place
        turned = rotate(key, by, INV_FREQ, PAIR_AXIS) if self.cache.axes > 1 else rotate(key, by[0], INV_FREQ)
        return turned, self.middle

    def compacted(self):
        for layer, head in np.ndindex(LAYERS, HEADS):
            reference = self.references[layer][head]
            for slot in reference.opened():
                del reference.at[slot]
            for slot in reference.sealed() if not self.contiguous else ():
                cluster = reference.at[slot]
                cluster.hold(dict.fromkeys(cluster.tokens, self.turned(cluster.key, cluster.place)))
            held = self.held(layer, head)
            for seq in sorted(held)[PREFIX:]:
                reference.join(seq, *held[seq])
        self.contiguous = True

    def check(self):
        """Store and index hold the reference's clusters, row by row."""
        for layer, head in np.ndindex(LAYERS, HEADS):
            reference, clusters = self.references[layer][head], self.policy.clusters
            assert np.flatnonzero(clusters.sealed[layer, head]).tolist() == reference.sealed()
            for slot in reference.sealed():
                rows = self.of_slot(layer, head, slot)
                assert sorted(rows.seq[0].tolist()) == reference.at[slot].seq
                for seq, key in zip(rows.seq[0].tolist(), rows.key[0], strict=True):
                    np.testing.assert_array_equal(key, self.rows[layer, head, seq])
            assert self.policy.offloaded[layer, head] == sum(len(reference.at[slot].tokens) for slot in reference.sealed())

    def of_slot(self, layer, head, slot):
        numbers, left = self.policy.pages.blocks_of(layer, head, np.array([slot]), 10_000)
        rows = joined(self.store.get(numbers))
        assert len(rows) == self.policy.pages.held(layer)[head, slot]
        assert left == 0
        return rows

    def query(self, rows=4, scale=2.0, seed=1):
        random = np.random.default_rng(seed)
        return (scale * random.normal(size=(HEADS * GROUP, rows, self.cache.head_dim))).astype(np.float32)

    def check_choice(self, layer, query, phase="question"):
        """The blocks that are chosen hold just the tokens of the clusters that the reference chooses, best first."""
        chosen, fetched = self.policy.choose(layer, query, phase), 0
        for head, numbers in enumerate(chosen):
            reference = self.references[layer][head]
            rows = query[head * GROUP : (head + 1) * GROUP].reshape(-1, query.shape[2])
            best, margin = reference.choose(rows, self.policy.threshold)
            assert margin > 1e-6
            sealed = [slot for slot in best if not reference.at[slot].open]
            wanted = sorted(sealed, key=lambda slot: -best[slot])
            seqs = [sorted(block.seq[0].tolist()) for block in self.store.get(numbers)]
            expected = [seq for slot in wanted for seq in reference.at[slot].seq]
            assert sorted(chain.from_iterable(seqs)) == sorted(expected)
            order = [next(slot for slot in wanted if of_block[0] in reference.at[slot].tokens) for of_block in seqs]
            assert [slot for at, slot in enumerate(order) if slot not in order[:at]] == wanted
            fetched += len(expected)
        return fetched


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_clusters_and_choices_are_those_of_the_reference(dtype, axes, monkeypatch):
    monkeypatch.setattr(cluster_pages, "PAGE_ROWS", 3)
    watched = Watched(dtype=dtype, axes=axes)
    watched.policy.working_rows = 10_000  # nothing is cut
    fetched = 0
    for turn in range(6):
        watched.frames(6, reindex_at={4} if turn in (2, 4) else ())
        watched.check()
        fetched += sum(watched.check_choice(layer, watched.query(seed=turn, scale=6)) for layer in range(LAYERS))
    assert fetched > 100
    assert watched.policy.merges == sum(of.merged + of.forced for layer in watched.references for of in layer) > 0


def test_a_choice_too_large_is_cut_by_score_and_counted():
    """What is left out is what scored lowest; the block that reaches the end is still fetched, for the working set to cut."""
    watched = Watched(",index=0.5,threshold=0.95", beside=False)
    watched.frames(40)
    policy, query = watched.policy, watched.query(scale=0.2)
    policy.working_rows = 10_000
    whole, cut_before = policy.choose(0, query, "question"), policy.working.truncated
    policy.working_rows = rows = 20
    cut, left_out = policy.choose(0, query, "question"), 0
    for all_of_it, some in zip(whole, cut, strict=True):
        sizes = [len(block) for block in watched.store.get(all_of_it)]
        reached = np.cumsum(sizes) - sizes < rows
        assert some == all_of_it[: reached.sum()]
        left_out += sum(sizes[reached.sum() :])
    assert policy.working.truncated - cut_before == left_out > 0


def test_blocks_that_are_lost_leave_the_index():
    watched = Watched(beside=False)
    watched.frames(25)
    policy, query = watched.policy, watched.query(scale=6)
    chosen, below = policy.choose(0, query, "question"), policy.offloaded.copy()
    gone = [of_head[0] for of_head in chosen if of_head]
    rows = sum(map(len, watched.store.get(gone)))
    watched.store.lose(gone)
    after = policy.choose(0, query, "question")
    assert gone
    assert not set(gone) & set(chain.from_iterable(after))
    assert below.sum() - policy.offloaded.sum() == policy.lost == rows
    assert (np.where(policy.clusters.sealed, policy.clusters.count, 0).sum(2) == policy.offloaded).all()
    watched.frames(20)
    assert (policy.clusters.count >= 0).all()
    for layer, count in enumerate(np.where(policy.clusters.sealed, policy.clusters.count, 0)):
        assert (policy.pages.held(layer) == count).all()


def test_an_index_without_room_is_refused():
    with pytest.raises(UserError, match="too few for 4 clusters; increase --budget or index="):
        Watched(",index=0.02")
