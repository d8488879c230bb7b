"""ReSV's kernels beside the float64 account of them: the same bits, the same clusters, the same selections."""

import numpy as np
import pytest
from policies.reference_resv import ReferenceClusters

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.resv import HashClusters

HEADS, DIM, AXES = 2, 16, 3


@pytest.fixture(params=["scalar", "best"])
def isa(request):
    before = kernels.simd()
    if request.param == "scalar":
        kernels.use_simd("scalar")
    yield
    kernels.use_simd(before)


class Both:
    """One layer's clusters, and the reference's of each head, fed the same tokens."""

    def __init__(self, slots, distance):
        self.clusters = HashClusters(1, HEADS, DIM, AXES, slots)
        self.distance, self.tokens, self.slot = distance, [], []
        normals = self.clusters.planes.astype(np.float64)
        self.reference = [ReferenceClusters(slots, normals[head], distance + 1) for head in range(HEADS)]
        self.merged = self.forced = 0

    def join(self, keys, places):
        """Keys ``[HEADS, n, DIM]``."""
        slot, _, merged, forced = self.clusters.join(0, keys, places, self.distance)
        first = len(self.tokens)
        for i in range(keys.shape[1]):
            expected = [of.join(first + i, keys[h, i], places[h, i]) for h, of in enumerate(self.reference)]
            assert slot[:, i].tolist() == expected
            self.tokens.append((keys[:, i], places[:, i]))
            self.slot.append(slot[:, i])
        self.count(merged, forced)

    def leave(self, held, leaving):
        """Of the tokens ``held`` those of the mask ``leaving`` go."""
        keys, places = (np.stack([self.tokens[seq][part] for seq in held], 1) for part in (0, 1))
        slot = np.stack([self.slot[seq] for seq in held], 1).astype(np.int32)
        moved, merged = self.clusters.seal(0, keys, places, slot, np.stack([leaving] * HEADS))
        gone = [seq for seq, goes in zip(held, leaving, strict=True) if goes]
        for head, of in enumerate(self.reference):
            of.seal(set(gone))
            for seq in gone:
                home = moved[head, self.clusters.slots + self.slot[seq][head]]
                assert seq in of.at[home].tokens, "each token is where it is said to be"
        self.count(merged)

    def count(self, merged, forced=0):
        self.merged += merged
        self.forced += forced
        assert self.merged == sum(of.merged for of in self.reference)
        assert self.forced == sum(of.forced for of in self.reference)

    def check(self):
        for head, of in enumerate(self.reference):
            parts = self.clusters
            assert np.flatnonzero(parts.count[0, head]).tolist() == sorted(of.at)
            for slot, cluster in of.at.items():
                assert parts.count[0, head, slot] == len(cluster.tokens)
                assert parts.open[0, head, slot] == cluster.open
                np.testing.assert_allclose(parts.key[0, head, slot], cluster.key, atol=1e-5)
                np.testing.assert_allclose(parts.position[0, head, slot], cluster.place, rtol=1e-5)
                assert cluster.bits == parts.bits[0, head, slot]


def tokens(random, n, kinds=9, noise=0.35):
    """Keys that lie about a few directions, so that some are alike, and places."""
    centres = np.random.default_rng(1).normal(size=(HEADS, kinds, DIM))
    keys = centres[:, random.integers(kinds, size=n)] + noise * random.normal(size=(HEADS, n, DIM))
    return keys.astype(np.float32), random.uniform(0, 900, (HEADS, n, AXES)).astype(np.float32)


@pytest.mark.parametrize(("slots", "distance"), [(200, 7), (40, 7), (12, 7), (40, 0), (40, 32), (6, 3), (4, 7), (5, 12)])
def test_clusters_are_those_of_the_reference(isa, slots, distance):
    """A window of 60 tokens that 25 at a time run through: open, sealed in parts, merged when the slots are used up."""
    random, both, held = np.random.default_rng(slots), Both(slots, distance), []
    for _ in range(9):
        first = len(both.tokens)
        both.join(*tokens(random, 25))
        held += range(first, first + 25)
        if len(held) > 60:
            leaving = np.arange(len(held)) < len(held) - 35
            mixed = random.permutation(len(held))  # rows of a cache are in no order
            both.leave([held[i] for i in mixed], leaving[mixed])
            held = [seq for seq, goes in zip(held, leaving, strict=True) if not goes]
        both.check()
    if slots < 40:
        assert both.merged + both.forced > 15
    if slots == 200:
        assert both.merged == both.forced == 0
        assert 20 < (both.clusters.count > 0).sum() / HEADS < 150
    if slots == 6:
        assert both.forced > 0
