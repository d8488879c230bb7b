"""last-seen against the float64 reference, and what it is for: of what looks alike the last stays."""

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from policies.filled import DIM, HEADS, PREFIX, STORAGE, Filled, play
from policies.reference_infinipot_v import NearTieError
from policies.reference_last_seen import LastSeen

from edgevlm.runtime.policies import StreamShape, create_policy


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_keeps_what_the_reference_keeps(data):
    grid = data.draw(st.sampled_from([(2, 2), (3, 2), (1, 5)]), label="grid")
    per_frame, layers = grid[0] * grid[1], data.draw(st.integers(1, 3), label="layers")
    budget = data.draw(st.integers(per_frame, 9 * per_frame), label="budget")
    random = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    storage = data.draw(st.sampled_from(STORAGE), label="dtype and axes")
    filled, policy = Filled(layers, budget + per_frame, grid, random, *storage), create_policy("last-seen")
    policy.attach(budget, StreamShape(layers, per_frame, PREFIX))
    most = max(1, min(policy.max_append, budget) // per_frame)
    pieces = data.draw(st.lists(st.integers(1, most), min_size=20, max_size=20), label="frames a piece")
    reference = LastSeen(filled)
    try:
        assert play(filled, policy, pieces, reference.expected, reference.appended)
    except NearTieError:
        reject()


def opened(budget, noise=0.3):
    """Two layers of frames of four tokens."""
    policy = create_policy("last-seen")
    policy.attach(budget, StreamShape(2, 4, PREFIX))
    filled = Filled(2, budget + 4, (2, 2), np.random.default_rng(5))
    filled.noise = noise
    return policy, filled


def watch(policy, filled, frames):
    """Frames one by one, as a session appends them."""
    for _ in range(frames):
        plan = policy.before_append(filled.cache, 4, None)
        if plan is not None:
            filled.cache.evict(plan.keep)
        filled.frame()


def test_the_last_sight_of_what_has_left_stays_for_long():
    """Something shows in one patch for five frames of a still scene; 60 frames on its last token is there, and none before."""
    policy, filled = opened(budget=16, noise=0.05)
    watch(policy, filled, 12)
    scene = filled.base[:, :, 2].copy()
    filled.base[:, :, 2] = np.random.default_rng(1).normal(size=(2, HEADS, DIM))
    watch(policy, filled, 5)
    last = filled.seq - 2  # of the patch, in the fifth of its frames
    filled.base[:, :, 2] = scene
    watch(policy, filled, 60)
    shown = set(range(last - 16, last + 1, 4))
    for layer in range(2):
        for head in filled.cache.seq(layer):
            assert shown & set(head.tolist()) == {last}
