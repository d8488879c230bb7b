"""InfiniPot-V against the float64 reference: which tokens are kept, not only how many."""

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from policies import reference_infinipot_v as reference
from policies.filled import DIM, HEADS, INV_FREQ, PREFIX, Filled, rows_of, write

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
    ("infinipot-v:keys=rotated", {"rotated": True}),
    ("infinipot-v:heads=shared", {"shared": True}),
    ("infinipot-v:keep_recent=off", {"keep_recent": False}),
    ("infinipot-v:alpha=0", {"alpha": 0.0}),
    ("infinipot-v:alpha=1", {"alpha": 1.0}),
    ("infinipot-v:recent=0.5", {"recent": 0.5}),
    ("infinipot-v:tau=0.1/0.2/0.4", {"thresholds": (0.1, 0.2, 0.4)}),
    ("infinipot-v:tar=frame", {"by_patch": False}),
    ("infinipot-v:tar=frame,heads=shared,keep_recent=off", {"by_patch": False, "shared": True, "keep_recent": False}),
    ("infinipot-v:tar=reverse,alpha=1", {"most_alike": True, "alpha": 1.0}),
    ("infinipot-v:van=plain", {"pool": False}),
    ("infinipot-v:van=reverse,alpha=0,keep_recent=off", {"smallest": True, "pool": False, "alpha": 0.0, "keep_recent": False}),
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


@pytest.mark.parametrize("content", ["zero", "equal", "huge"])
def test_adversarial_content(content):
    """Zero vectors, equal scores and huge norms: ties go to the newer token, just the reference's |C| stay.

    All vectors point one way and their norms are powers of two, so that scores are exact and ties are ties in any precision.
    """
    budget, grid = 24, (2, 2)
    filled = Filled(3, budget, grid, np.random.default_rng(1))
    policy = create_policy("infinipot-v:keys=rotated")  # as stored: bit-equal rows have bit-equal scores
    policy.attach(budget, StreamShape(3, 4, PREFIX))
    cache, compressions = filled.cache, 0
    for _ in range(20):
        plan = policy.before_append(cache, 4, None)
        if plan is not None:
            for layer, mask in enumerate(plan.keep):
                expected = reference.select(filled.heads(layer), layer, 3, budget, 4, 18, INV_FREQ, rotated=True)
                for head in range(HEADS):
                    vision = cache.kind(layer)[head] == Kind.VISION
                    assert mask[head][~vision].all()
                    assert sorted(cache.seq(layer)[head][mask[head] & vision].tolist()) == sorted(expected[head])
                    assert len(expected[head]) == 18
            cache.evict(plan.keep)
            compressions += 1
        seq = np.arange(filled.seq, filled.seq + 4)
        size = {"zero": np.zeros(4), "equal": np.ones(4), "huge": 2.0 ** (60 - seq % 3)}[content]
        cache.reserve(4)
        for layer in range(3):
            rows = np.broadcast_to(size[:, None] * (np.arange(DIM) < 4), (HEADS, 4, DIM))  # of norm 2 size
            write(cache, layer, rows, rows)
        cache.commit(rows_of(Kind.VISION, seq, [filled.frames] * 4, [0, 0, 1, 1], [0, 1, 0, 1], seq))
        filled.seq += 4
        filled.frames += 1
    assert compressions >= 5


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


def test_alg2_without_recent_frames_can_drop_them():
    """The difference between Algs. 1 and 2: with low value norms, Alg. 2 drops tokens of the newest frame."""
    kept = {}
    for text in ("infinipot-v", "infinipot-v:keep_recent=off"):
        filled = Filled(1, 16, (2, 2), np.random.default_rng(3))
        policy = create_policy(text)
        policy.attach(16, StreamShape(1, 4, PREFIX))
        for _ in range(3):
            filled.frame()
        filled.base *= 0.01
        filled.frame()
        (mask,) = policy.before_append(filled.cache, 4, None).keep
        kept[text] = int((mask & (filled.cache.frame(0) == 3)).sum())
    assert kept == {"infinipot-v": 8, "infinipot-v:keep_recent=off": 0}


def kept_of(text):
    """What one compression of 6 frames of 4 tokens to 18 tokens keeps: per head the places (frame, row, column)."""
    filled = Filled(1, 24, (2, 2), np.random.default_rng(5))
    policy = create_policy(text)
    policy.attach(24, StreamShape(1, 4, PREFIX))
    for _ in range(6):
        filled.frame()
    cache = filled.cache
    (mask,) = policy.before_append(cache, 4, None).keep
    mask &= cache.kind(0) == Kind.VISION
    places = np.stack([cache.frame(0), cache.row(0), cache.col(0)], -1)
    return [set(map(tuple, of_head[rows].tolist())) for of_head, rows in zip(places, mask, strict=True)]


def test_tar_by_frames_keeps_frames_whole_but_one():
    for kept in kept_of("infinipot-v:alpha=1,tar=frame"):
        frames = [frame for frame, _, _ in kept]
        assert sorted(map(frames.count, set(frames))) == [2, 4, 4, 4, 4]
        assert frames.count(5) == 4


@pytest.mark.parametrize(
    "settings",
    ["alpha=1,tar=patch alpha=1,tar=reverse", "alpha=0,keep_recent=off,van=plain alpha=0,keep_recent=off,van=reverse"],
)
def test_reversed_keeps_first_what_would_go_first(settings):
    """Of 24 tokens 18 stay; whichever 6 go one way are among the first to stay the other."""
    one, other = (kept_of(f"infinipot-v:{text}") for text in settings.split())
    for kept, reversed_ in zip(one, other, strict=True):
        assert len(kept) == len(reversed_) == 18
        assert len(kept | reversed_) == 24


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
