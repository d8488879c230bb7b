"""InfiniPot-V against the float64 reference: which tokens are kept, not only how many."""

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from policies import reference_infinipot_v as reference
from policies.filled import HEADS, INV_FREQ, PREFIX, Filled

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import StreamShape, create_policy

pytestmark = pytest.mark.usefixtures("kv")


def compress(filled, policy, budget, incoming, settings_of_reference):
    """Run the policy and the reference on the same cache; check every layer and evict."""
    cache, per_frame = filled.cache, filled.grid[0] * filled.grid[1]
    plan = policy.before_append(cache, incoming, None)
    if plan is None:
        assert np.all(cache.lengths - PREFIX + incoming <= budget)
        return
    target = max(0, min(int(budget * 0.75), budget - incoming))
    for layer, mask in enumerate(plan.keep):
        if mask is None:
            assert cache.lengths[layer] - PREFIX <= target
            continue
        expected = reference.select(
            filled.heads(layer), layer, cache.layers, budget, per_frame, target, INV_FREQ, **settings_of_reference
        )
        for head in range(HEADS):
            vision = cache.kind(layer)[head] == Kind.VISION
            assert mask[head][~vision].all(), "the prefix stays"
            assert set(cache.seq(layer)[head][mask[head] & vision].tolist()) == expected[head]
    cache.evict(plan.keep)
    cache.reindex(PREFIX)
    assert np.all(cache.lengths - PREFIX <= target)


CASES = [
    ("infinipot-v", {}),
    ("infinipot-v:alpha=0", {"alpha": 0.0}),
    ("infinipot-v:alpha=1", {"alpha": 1.0}),
    ("infinipot-v:recent=0.5", {"recent": 0.5}),
    ("infinipot-v:tau=0.1/0.2/0.4", {"thresholds": (0.1, 0.2, 0.4)}),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[case[0] for case in CASES])
@given(data=st.data())
@settings(max_examples=2)
def test_keeps_what_the_reference_keeps(text, expected, data):
    grid = data.draw(st.sampled_from([(2, 2), (3, 2), (1, 5), (4, 4)]), label="grid")
    per_frame = grid[0] * grid[1]
    budget = data.draw(st.integers(per_frame, 9 * per_frame), label="budget")  # any remainder
    layers = data.draw(st.integers(1, 5), label="layers")
    filled = Filled(layers, budget, grid, np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed")))
    policy = create_policy(text)
    policy.attach(budget, StreamShape(layers, per_frame, PREFIX))
    for _ in range(2 * budget // per_frame + 3):
        try:
            compress(filled, policy, budget, per_frame, expected)
        except reference.NearTieError:
            reject()
        filled.frame()


def test_recent_frames_larger_than_the_target_leave_only_the_newest():
    """r p > |C|: keep the newest |C| tokens and stop there."""
    filled = Filled(2, 8, (2, 2), np.random.default_rng(0))
    policy = create_policy("infinipot-v:target=0.4")
    policy.attach(8, StreamShape(2, 4, PREFIX))  # |C| = 3, r = 1 frame of 4
    filled.frame()
    filled.frame()
    mask, _ = policy.before_append(filled.cache, 4, None).keep
    kept = filled.cache.seq(0)[0][mask[0]]
    assert sorted(kept.tolist()) == [0, 1, 2, 8, 9, 10]


def test_thinned_frames_keep_as_many_newest_rows_as_whole_ones_have():
    policy = create_policy("infinipot-v:recent=0.5")
    policy.attach(32, StreamShape(2, 4, PREFIX, thinned=True))
    filled = Filled(2, 33, (1, 1), np.random.default_rng(0))
    for _ in range(32):
        filled.frame()
    for layer, keep in enumerate(policy.before_append(filled.cache, 1, None).keep):
        for head in range(HEADS):
            held = np.sort(filled.cache.frame(layer)[head][keep[head] & (filled.cache.kind(layer)[head] == Kind.VISION)])
            assert held[-16:].tolist() == list(range(16, 32))
            assert len(held) == 24
