"""ReKV: the frames it asks for are those that a float64 reference asks for, whatever the storage, merging and re-indexing."""

import numpy as np
import pytest
from policies.filled import GROUP, HEADS, INV_FREQ, PAIR_AXIS, PREFIX, STORAGE, Filled, turned
from policies.reference_retrieval import Frames
from stored import PlainStore

from edgevlm.runtime.policies import StreamShape, create_policy, layers_of
from edgevlm.runtime.positions import rope_tables

LAYERS, GRID = 2, (2, 3)
P = GRID[0] * GRID[1]


def opened(filled, budget, text="rekv", store=None):
    policy = create_policy(text)
    policy.attach(budget, StreamShape(LAYERS, P, PREFIX))
    policy.open(filled.cache, store or PlainStore())
    return policy


def content(filled, layer, frame):
    """The un-rotated keys of a frame as they were stored, ``[tokens, heads, dim]``, float64."""
    heads = [[token for token in head if token["frame"] == frame] for head in filled.heads(layer)]
    keys = [[turned(token["key"].astype(np.float64), -np.asarray(token["position"])) for token in head] for head in heads]
    return np.array(keys).transpose(1, 0, 2)


def watched(filled, policy, pieces, reindex_every=3):
    """Append pieces of so many frames as a session does; what each frame's keys were, ``[layer][frame]``."""
    seen, compressions = [{} for _ in range(LAYERS)], 0
    for count in pieces:
        plan = policy.before_append(filled.cache, count * P, None)
        if plan is not None:
            filled.cache.evict(plan.keep)
            compressions += 1
            if compressions % reindex_every == 0:
                filled.reindex()
                policy.compacted()
        first = filled.frames
        policy.after_append(layers_of(filled.cache), filled.frame(noise=1.0, count=count))
        for layer in range(LAYERS):
            seen[layer] |= {frame: content(filled, layer, frame) for frame in range(first, filled.frames)}
    return seen


def asked(filled, policy, rows=5, seed=1, axes=1):
    """What ``policy`` chooses for a random question, ``[layer][head]``, and its un-rotated queries by layer."""
    random = np.random.default_rng(seed)
    position = np.repeat(np.arange(filled.next, filled.next + rows, dtype=np.int32)[:, None], axes, 1)
    tables = rope_tables(position, INV_FREQ.astype(np.float32), PAIR_AXIS if axes == 3 else None)
    policy.begin(*tables)
    bare = random.normal(size=(LAYERS, HEADS * GROUP, rows, INV_FREQ.size * 2))
    queries = turned(
        bare, np.broadcast_to(position if axes == 3 else position[:, 0], (*bare.shape[:-1], *position.shape[1:axes]))
    )
    chosen = [policy.choose(layer, queries[layer].astype(np.float32), "question") for layer in range(LAYERS)]
    return chosen, bare


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
@pytest.mark.parametrize("index", [0.25, 0.06])
def test_the_frames_asked_for_are_those_of_the_reference(dtype, axes, index):
    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3), dtype, axes)
    policy = opened(filled, 160, f"rekv:index={index},window=0.4,each=2")
    pieces = [3, 1, 4, 2, 5, 3, 1, 1, 6, 2, 4, 4]
    seen = watched(filled, policy, pieces)
    below = filled.frames - policy.window_rows // P
    tolerance = {"fp32": 1e-5, "fp16": 4e-3, "int8": 0.08}[dtype]
    for layer in range(LAYERS):
        frames = policy._frames
        reference = Frames(frames.capacity)
        for frame in range(int(frames.added[layer])):
            reference.add(frame, seen[layer][frame])
        assert below - 8 <= frames.added[layer] <= below + 8
        if dtype == "fp32":
            count = int(frames.entries[layer])
            bounds = [(entry[0][0], entry[0][-1] + 1) for entry in reference.entries]
            assert list(zip(frames.first[layer, :count].tolist(), frames.end[layer, :count].tolist(), strict=True)) == bounds
            means = [entry[1].ravel() for entry in reference.entries]
            np.testing.assert_allclose(frames.mean[layer, :count], means, atol=tolerance)
        elif index == 0.25:
            means = [entry[1].ravel() for entry in reference.entries]
            np.testing.assert_allclose(frames.mean[layer, : len(means)], means, atol=tolerance)
    if dtype == "fp32":
        chosen, bare = asked(filled, policy, axes=axes)
        most = policy.working_rows // P
        for layer in range(LAYERS):
            expected = [frame * LAYERS + layer for frame in reference_of(policy, seen, layer).best(bare[layer], most, 2)]
            assert [list(of_head) for of_head in chosen[layer]] == [expected] * HEADS
            assert 0 < len(expected) <= most
            assert [block.frame[0, 0] * LAYERS + layer for block in policy.store.get(expected)] == expected
    assert (policy.merged > 0) == (index == 0.06)


def reference_of(policy, seen, layer):
    reference = Frames(policy._frames.capacity)
    for frame in range(int(policy._frames.added[layer])):
        reference.add(frame, seen[layer][frame])
    return reference


def test_a_frame_that_leaves_in_two_parts_is_one_block_and_one_mean():
    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3))
    whole, parts = (opened(filled, 160) for _ in range(2))
    filled.frame(noise=1.0, count=2)
    for policy, cuts in ((whole, [6, 12]), (parts, [4, 6, 11, 12])):
        for before, after in zip([0, *cuts], cuts, strict=False):
            for layer in range(LAYERS):
                seq = filled.cache.seq(layer) - PREFIX
                policy.offload(filled.cache, layer, (seq >= before) & (seq < after))
    np.testing.assert_allclose(parts._frames.mean, whole._frames.mean, atol=1e-6)
    for one, other in zip(parts.store.get([0, 1, 2, 3]), whole.store.get([0, 1, 2, 3]), strict=True):
        np.testing.assert_array_equal(one.seq, other.seq)
        np.testing.assert_array_equal(one.key, other.key)


def test_what_the_store_has_lost_leaves_the_index():
    filled = Filled(LAYERS, 400, GRID, np.random.default_rng(3))
    policy = opened(filled, 160, "rekv:index=0.06,each=9", PlainStore())
    watched(filled, policy, [4] * 8)
    before = policy._frames.added.copy()
    policy.store.lose([frame * LAYERS for frame in range(int(before[0])) if frame != 7])
    watched(filled, policy, [2])
    assert policy.lost == before[0] - 1
    chosen, _ = asked(filled, policy)
    assert 7 * LAYERS in chosen[0][0]
    assert all(number is not None for number in policy.store.get([7 * LAYERS]))
    held = [policy._frames.held[layer, : policy._frames.entries[layer]].sum() for layer in range(LAYERS)]
    assert held == [1 + policy._frames.added[0] - before[0], policy._frames.added[1]], "the other layer has lost nothing"
