"""What mosaic does beside choosing: representatives, prefetch, bounds, loss, snapshots, and sessions on the demo."""

import numpy as np
import pytest
from policies.filled import HEADS, STORAGE, turned
from policies.mosaic_world import LAYERS, World

from edgevlm.runtime.engine import arrays_of


def attended(world, layer, head):
    """Keys, un-scaled, and values of the working set of a head."""
    start, count = int(world.cache.lengths[layer]), int(world.policy.working.held[layer, head])
    scales = world.cache.key_scale(layer), world.cache.value_scale(layer)
    rows = [part[head, start : start + count] for part in arrays_of(world.cache.buffers()[layer])]
    return [of * (1 if scale is None else scale[head]) for of, scale in zip(rows, scales, strict=True)]


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_all_representatives_are_attended_to_each_where_its_newest_member_stands(dtype, axes):
    world = World("loose=0.6", dtype=dtype, axes=axes)
    world.play(50)
    _, rotated = world.query()
    tolerance = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.1}[dtype]
    for layer in range(LAYERS):
        held = world.policy.attend(layer, rotated[layer], "prefill")
        for head in range(HEADS):
            clusters = world.reference[layer][head].clusters
            key, value = attended(world, layer, head)
            assert held[head] == len(key) == len(clusters) > 1, "frames see no other rows from below"
            expected = [turned(one.mean, np.asarray(one.newest["position"])) for one in clusters]
            np.testing.assert_allclose(np.sort(key, 0), np.sort(expected, 0), atol=tolerance)
            np.testing.assert_allclose(np.sort(value, 0), np.sort([one.value for one in clusters], 0), atol=2 * tolerance)


def test_what_the_layer_before_asks_is_read_ahead():
    world = World("partitions=1,loose=0.4,tight=0.2")
    world.play(80)
    _, rotated = world.query()
    world.policy.look_ahead(1, rotated[0], "question")
    chosen = world.policy.choose(1, rotated[0], "question")
    assert set(world.store.prefetched[-1]) == {number for of_head in chosen for number in of_head} != set()


def test_a_cluster_whose_block_is_lost_leaves_the_index_and_is_counted():
    world = World("loose=0.4,tight=0.2")
    world.play(60)
    at = (1, 0)
    found = world.clusters(*at)
    seqs, slot = max(found.items(), key=lambda one: len(one[0]))
    world.store.lose(world.policy.clusters.pages.block_ids(*at, [slot]))
    _, rotated = world.query()
    world.policy.attend(1, rotated[1], "question")
    left = world.clusters(*at)
    assert set(left) == set(found) - {seqs}
    world.play(10)
    assert world.policy.working.held[1, 0] > 0
