"""The hybrid: its clusters are those of a float64 reference, and below lies the newest of each."""

import numpy as np
import pytest
from policies.filled import GROUP, HEADS, INV_FREQ, Filled
from policies.reference_retrieval import Alike, sketched_product
from policies.test_rekv import GRID, LAYERS, P, asked, opened
from stored import PlainStore

from edgevlm.runtime.policies import layers_of
from edgevlm.runtime.policies.hybrid import ClusterIndex, KeySketches
from edgevlm.runtime.retrieval.working_set import unrotated_keys

WIDTH = 6


def things(random, kinds, tokens, layers=2):
    """``tokens`` noisy copies of ``kinds`` directions, ``[layers, tokens, width]``, and which each is of."""
    base, of = random.normal(size=(layers, kinds, WIDTH)), random.integers(kinds, size=tokens)
    return (base[:, of] + 0.1 * random.normal(size=(layers, tokens, WIDTH))).astype(np.float32), of


def partition(index, members):
    """Clusters as sets of tokens."""
    return sorted(tuple(sorted(members[at])) for at in range(index.clusters))


def followed(index, keys, pieces):
    """``keys`` join in pieces; the tokens of each cluster by where it stands, found from its running count and mean alone."""
    members, at = {}, 0
    for count in pieces:
        piece = keys[:, at : at + count]
        before = [tuple(members.get(cluster, ())) for cluster in range(index.clusters)]
        joined, _ = index.join(piece[-1])
        members = {cluster: [] for cluster in range(index.clusters)}
        for tokens in before:  # where their mean has gone
            home = max(range(index.clusters), key=lambda c: similarity(index, c, keys, tokens))
            members[home] += tokens
        for token, cluster in enumerate(joined.tolist()):
            members[cluster].append(at + token)
        at += count
    return members


def similarity(index, cluster, keys, tokens):
    mean, kept = keys[-1, list(tokens)].mean(0), index.means()[cluster]
    return mean @ kept / np.linalg.norm(mean) / np.linalg.norm(kept)


@pytest.mark.parametrize(("kinds", "capacity"), [(5, 12), (12, 6)])
def test_clusters_are_those_of_the_reference(kinds, capacity):
    keys, _ = things(np.random.default_rng(5), kinds, 120)
    index = ClusterIndex(2, WIDTH, 3, capacity * ClusterIndex.entry_bytes(WIDTH, 3), 0.95)
    reference = Alike(capacity, 0.95)
    members = followed(index, keys, [7] * 17 + [1])
    for token in range(120):
        reference.add(keys[:, token].astype(np.float64))
    assert index.clusters == len(reference.clusters) <= capacity
    assert partition(index, members) == sorted(tuple(sorted(cluster)) for cluster in reference.clusters)
    assert index.merged == reference.merged
    assert (index.merged > 0) == (kinds > capacity)
    assert index.tau == pytest.approx(reference.tau, abs=0.005)
    assert index.count[: index.clusters].sum() == 120
    for at, tokens in members.items():
        wanted = reference.mean(-1, tokens)
        np.testing.assert_allclose(index.means()[at], wanted, atol=4 * np.abs(wanted).max() / 127)


def watched(filled, policy, pieces):
    """Frames of things that come again; the seqs that left, in order."""
    left = []
    for count in pieces:
        plan = policy.before_append(filled.cache, count * P, None)
        if plan is not None:
            seq = filled.cache.seq(0)[0]
            left.append(np.sort(seq[~plan.keep[0][0]]))
            filled.cache.evict(plan.keep)
        policy.after_append(layers_of(filled.cache), filled.frame(count=count))
    return left


def test_below_lie_the_newest_rows_of_each_cluster_with_their_own_numbers():
    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3))
    policy = opened(filled, 160, "hybrid:rows=3,tau=0.8")
    left = np.concatenate(watched(filled, policy, [2] * 30))
    index = policy._clusters
    assert 1 < index.clusters <= index.capacity
    assert index.count[: index.clusters].sum() == len(left), "every token that left is in a cluster"
    held = 0
    for cluster in range(index.clusters):
        seqs, keys = [], []
        for layer in range(LAYERS):
            first = index.runs[cluster]
            blocks = policy.store.get(first[first >= 0] + layer)
            seqs.append([block.seq.tolist() for block in blocks])
            keys.append(np.concatenate([unrotated_keys(filled.cache, layer, block) for block in blocks], 1))
            for block, rows in zip(blocks, index.rows[cluster][first >= 0], strict=True):
                assert len(block) == rows <= 3
                assert set(block.seq[0].tolist()) <= set(left.tolist())
                np.testing.assert_array_equal(block.seq[0], block.seq[1])
        assert all(of == seqs[0] for of in seqs), "the same tokens in every layer"
        sketches = policy._sketches.of(np.stack(keys))
        assert (sketches == index.sketch[cluster]).all(1).any(), "it is sought by a token that it has"
        held += sum(len(of[0]) for of in seqs[0])
    assert len(policy.store._blocks) == LAYERS * (index.runs[: index.clusters] >= 0).sum(), "what no cluster has is dropped"
    assert held <= 6 * index.clusters


def test_a_question_fetches_the_clusters_that_it_attends_to_most_and_no_more_than_there_is_room_for():
    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3))
    policy = opened(filled, 160, "hybrid:rows=2,tau=0.8")
    query = np.zeros((HEADS * GROUP, 1, INV_FREQ.size * 2), np.float32)
    assert policy.choose(0, query, "question") == [()] * HEADS, "nothing is below"
    watched(filled, policy, [2] * 30)
    chosen, bare = asked(filled, policy)
    assert policy.choose(0, query, "prefill") == [()] * HEADS
    assert policy.choose(1, query, "answer") == chosen[1]
    index = policy._clusters
    for layer in range(LAYERS):
        for head in range(HEADS):
            mass = np.zeros(index.clusters)
            for row in bare[layer][head * GROUP : (head + 1) * GROUP, -1].astype(np.float32):
                logits = policy._sketches.logits(index.sketch[: index.clusters], layer, head, row[None])[0]
                weights = np.exp(logits / np.sqrt(len(row)))
                mass += weights / weights.sum()
            expected, rows = [], 0
            for cluster in np.argsort(-mass, kind="stable"):
                expected += [first + layer for first in index.runs[cluster, ::-1] if first >= 0]
                rows += index.rows[cluster].sum()
                if rows >= policy.working_rows:
                    break
            assert chosen[layer][head] == expected
    assert policy.working.load(0, chosen[0]).max() <= policy.working_rows


def test_sketches_tell_products_whatever_mean_and_scale_the_channels_have():
    random, tokens = np.random.default_rng(7), 200
    scale = np.exp(random.normal(size=(2, HEADS, 1, 8)))
    keys = (scale * (random.normal(size=(2, HEADS, tokens, 8)) + 5 * random.normal(size=(2, HEADS, 1, 8)))).astype(np.float32)
    sketches = KeySketches(2, HEADS, INV_FREQ)
    for layer in range(2):
        sketches.fit(layer, keys[layer])
    made, query = sketches.of(keys), random.normal(size=(3, 8)).astype(np.float32)
    assert made.shape == (tokens, sketches.bytes)
    for layer, head in np.ndindex(2, HEADS):
        middle, spread = (part[layer, head, 0].astype(np.float64) for part in (sketches.middle, sketches.spread))
        wanted = [[sketched_product(row, key, middle, spread) for key in keys[layer, head]] for row in query]
        np.testing.assert_allclose(sketches.logits(made, layer, head, query), wanted, rtol=1e-4, atol=1e-4)
    plain, moved = KeySketches(2, HEADS, INV_FREQ), keys[-1] - keys[-1].mean(1, keepdims=True)
    plain.fit(-1, moved)
    np.testing.assert_allclose(plain.normal(moved), sketches.normal(keys[-1]), atol=0.05)  # of the mean alone it knows nothing


def test_what_the_store_has_lost_is_counted_and_left_out():
    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3))
    policy = opened(filled, 160, "hybrid:tau=0.8", PlainStore())
    watched(filled, policy, [2] * 30)
    gone = asked(filled, policy)[0][0][0][0]
    rows = policy.working.load(0, [[gone]] * HEADS).copy()
    policy.store.lose([gone])
    policy.working.forget()
    assert policy.working.load(0, [[gone]] * HEADS).max() == 0 < rows.min()
    policy.forget_lost()
    assert policy.lost == 1
    again = asked(filled, policy)[0]
    assert all(gone not in of_head for of_layer in again for of_head in of_layer)
    assert all(block is not None for of_layer in again for of_head in of_layer for block in policy.store.get(of_head))


def test_what_is_lost_while_a_snapshot_is_taken_is_in_none_of_its_parts():
    class LosesWhileItWrites(PlainStore):
        victim = None

        def state(self):
            if self.victim is not None:
                self.lose([self.victim])
                self.victim = None
            return super().state()

    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3))
    policy = opened(filled, 160, "hybrid:tau=0.8", LosesWhileItWrites())
    watched(filled, policy, [2] * 30)
    victim = policy.store.victim = asked(filled, policy)[0][1][0][0]  # of layer 1: its run goes in layer 0 too
    state = policy.state()
    extents = state["clusters.runs"][: state["clusters.clusters"]]
    first = extents[extents >= 0]
    held = sorted(number for start in first.tolist() for number in range(start, start + LAYERS))
    assert policy.lost == 1
    assert victim not in held
    assert state["store.numbers"].tolist() == held, "and what went with it is in no store"
