"""streaming-llm, simple-stream, uniform and random against readable references: which tokens are kept, whatever the budget."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import reference_baselines as reference
from policies.filled import HEADS, PREFIX, Filled

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import StreamShape, create_policy
from edgevlm.runtime.policies.baselines import thin

GRIDS = [(1, 1), (2, 2), (3, 2), (1, 5)]


def held_in_all(cache):
    """The vision tokens that each layer and head holds: the same ones."""
    (held,) = {
        tuple(sorted(cache.seq(layer)[head][cache.kind(layer)[head] == Kind.VISION].tolist()))
        for layer in range(cache.layers)
        for head in range(HEADS)
    }
    return set(held)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_simple_stream_holds_the_last_frames_whole_or_as_many_as_the_budget_has(data):
    grid, k = data.draw(st.sampled_from(GRIDS), label="grid"), data.draw(st.integers(1, 6), label="k")
    per_frame = grid[0] * grid[1]
    budget = data.draw(st.integers(per_frame, 14 * per_frame), label="budget")
    policy = create_policy(f"simple-stream:k={k}")
    policy.attach(budget, StreamShape(2, per_frame, PREFIX))
    frames = min(k, budget // per_frame)
    assert policy.layer_budgets.tolist() == [frames * per_frame] * 2
    filled, shown = Filled(2, frames * per_frame, grid, np.random.default_rng(0)), []
    for count in data.draw(st.lists(st.integers(1, frames), min_size=25, max_size=25), label="frames a piece"):
        if (plan := policy.before_append(filled.cache, count * per_frame, None)) is not None:
            filled.cache.evict(plan.keep)
        shown.extend(filled.frame(count=count).seq.reshape(count, per_frame).tolist())
        assert held_in_all(filled.cache) == reference.simple_stream(shown, frames)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_simple_stream_holds_what_the_last_frames_showed_where_only_changes_enter(data):
    """The newest of the k is seen whole beside the memory; a patch that stays as it was is held however old its row is."""
    k, per_frame = data.draw(st.integers(1, 5), label="k"), 6
    policy = create_policy(f"simple-stream:k={k}")
    policy.attach(100, StreamShape(2, per_frame, PREFIX, thinned=True))
    assert policy.layer_budgets.tolist() == [k * per_frame] * 2
    filled, shown = Filled(2, k * per_frame, (3, 2), np.random.default_rng(0)), []
    now = np.full(per_frame, -1)
    patches = st.lists(st.booleans(), min_size=per_frame, max_size=per_frame)
    for number, changes in enumerate([[True] * per_frame, *data.draw(st.lists(patches, min_size=20, max_size=20))]):
        at = np.flatnonzero(changes)
        assert len(at) == 0 or policy.before_append(filled.cache, len(at), None) is None, "there is room"
        if len(at):
            content = filled.random.normal(size=(2, HEADS, len(at), filled.base.shape[-1]))
            now[at] = filled.append(Kind.VISION, len(at), [number] * len(at), at // 2, at % 2, content).seq
        filled.frames += 1
        filled.cache.confirm(now.reshape(3, 2), number)
        shown.append(now.tolist())
        if (plan := policy.before_append(filled.cache, 0, None)) is not None:
            filled.cache.evict(plan.keep)
        assert held_in_all(filled.cache) == reference.simple_stream(shown, k - 1)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_uniform_spacing_stays_even(data):
    """Whatever the pieces, no gap behind the newest frame is larger than two neighbouring ones together."""
    per_frame, budget = data.draw(st.integers(1, 6)), data.draw(st.integers(12, 80))
    policy = create_policy("uniform")
    policy.attach(budget, StreamShape(1, per_frame, 0))
    frames, held, time = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    for _ in range(120):
        count = data.draw(st.integers(1, policy.max_append // per_frame))
        if held.sum() + count * per_frame > budget:
            kept = thin(frames, held, per_frame, policy.compress_to)
            assert kept.sum() == policy.compress_to
            assert ((kept > 0) & (kept < per_frame)).sum() <= 1
            assert kept[-1] == min(per_frame, policy.compress_to)
            frames, held = frames[kept > 0], kept[kept > 0]
            gaps = np.diff(frames[held == per_frame])[:-1]
            assert len(gaps) < 2 or gaps.max() <= (gaps[:-1] + gaps[1:]).min()
            assert frames[held == per_frame][0] == 0 or len(gaps) == 0
        frames = np.append(frames, np.arange(time, time + count))
        held = np.append(held, np.full(count, per_frame))
        time += count


def test_frames_of_a_few_tokens_spread_over_the_stream_too():
    """A frame of one token does not pass for what an eviction has left of it."""
    policy = create_policy("uniform")
    policy.attach(32, StreamShape(1, 4, PREFIX, thinned=True))
    filled = Filled(1, 40, (1, 1), np.random.default_rng(0))
    for _ in range(64):
        plan = policy.before_append(filled.cache, 1, lambda: None)
        if plan is not None:
            filled.cache.evict(plan.keep)
        filled.frame()
    cache = filled.cache
    for head in range(HEADS):
        held = np.sort(cache.frame(0)[head][cache.kind(0)[head] == Kind.VISION])
        assert held[-1] == 63
        assert np.diff(held).max() <= 6
