"""Mosaic beside a reference that keeps lists of members: the same clusters, the same selections."""

import numpy as np
import pytest
from policies.filled import HEADS, STORAGE
from policies.mosaic_world import LAYERS, World


def same_clusters(world):
    """Clusters, partitions, sizes, means and variances; returns how many there are."""
    count = 0
    for layer, head in np.ndindex(LAYERS, HEADS):
        table, found, at = world.policy.clusters, world.clusters(layer, head), (layer, head)
        expected = {tuple(token["seq"] for token in one.members): one for one in world.reference[layer][head].clusters}
        assert set(found) == set(expected)
        together = {}
        for seqs, slot in found.items():
            one, where = expected[seqs], (*at, slot)
            together.setdefault(int(table.partition[where]), set()).add(one.partition)
            assert (table.size[where], table.seq[where]) == (one.size, one.newest["seq"])
            np.testing.assert_allclose(table.key[where], one.mean, atol=2e-5)
            np.testing.assert_allclose(table.value[where], one.value, atol=2e-5)
            np.testing.assert_allclose(table.variance[where], one.variance, atol=2e-5)
            waits = one.parent is not None
            assert (table.parent[where] >= 0) == waits
        assert all(len(labels) == 1 for labels in together.values())
        assert len({min(labels) for labels in together.values()}) == len(together)
        count += len(found)
    assert world.policy.clusters.merged == counted(world, "merges")
    return count


def counted(world, name):
    return sum(getattr(head, name) for heads in world.reference for head in heads)


def same_choice(world, phase="question"):
    """Of every layer for a random query; returns the clusters chosen."""
    bare, rotated = world.query()
    total = 0
    for layer in range(LAYERS):
        chosen = world.policy.choose(layer, rotated[layer], phase)
        for head, numbers in enumerate(chosen):
            queries = world.of_group(bare, layer, head)
            room = world.policy.working_rows
            expected = world.reference[layer][head].select(queries, world.policy.partitions, room)
            members = [token["seq"] for one in expected for token in one.members]
            found = world.seqs(numbers)
            assert set(found) <= set(members)
            assert len(found) >= min(len(members), room - len(world.reference[layer][head].clusters))
            total += len(expected)
    return total


@pytest.mark.parametrize("resident", [True, False], ids=["host", "disk"])
def test_the_same_clusters_and_selections_as_the_reference(resident):
    world = World("partitions=2,tight=0.2,loose=0.4", resident)
    for frames in (60, 20, 20):
        world.play(frames)
        assert same_clusters(world) >= 4
        assert same_choice(world) > 0
        assert same_clusters(world) >= 4, "a question's deferred splits are the same too"
    assert counted(world, "splits") > 0
    assert (counted(world, "deferred") > 0) == (not resident)
    assert counted(world, "merges") > 0, "a new partition needs a slot"


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_whatever_the_storage_and_the_positions(dtype, axes):
    world = World("partitions=2", dtype=dtype, axes=axes)
    world.play(60, piece=3)
    world.filled.reindex()
    world.policy.compacted()
    world.play(40, piece=3)
    assert same_clusters(world) >= 4
    assert same_choice(world) > 0
