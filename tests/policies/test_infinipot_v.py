"""InfiniPot-V against the float64 reference: which tokens are kept, not only how many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import reference_infinipot_v as reference

from edgevlm.runtime.cache import KVCache, Rows
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies import StreamShape, create_policy

HEADS, DIM, PREFIX = 2, 8, 3
INV_FREQ = 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))


def rows_of(kind, seq, frame, row, col, position):
    return Rows(
        kind=np.full(len(seq), kind, np.uint8),
        seq=np.asarray(seq, np.int64),
        frame=np.asarray(frame, np.int32),
        row=np.asarray(row, np.int16),
        col=np.asarray(col, np.int16),
        position=np.asarray(position, np.int32)[:, None],
    )


class Filled:
    """A cache that frames of a small moving grid are appended to, as an engine would."""

    def __init__(self, layers, capacity, grid, random):
        self.cache = KVCache(layers, HEADS, DIM, capacity + PREFIX, inv_freq=INV_FREQ)
        self.grid, self.random, self.frames, self.seq = grid, random, 0, 0
        self.base = random.normal(size=(layers, HEADS, grid[0] * grid[1], DIM))
        self.append(
            Kind.PREFIX,
            PREFIX,
            [-1] * PREFIX,
            [0] * PREFIX,
            [0] * PREFIX,
            random.normal(size=(layers, HEADS, PREFIX, DIM)),
        )

    def append(self, kind, count, frame, row, col, content):
        position = np.arange(self.seq, self.seq + count)
        self.cache.reserve(count)
        for layer, (key, value) in enumerate(zip(self.keys(content, position), 2 * content, strict=True)):
            write(self.cache, layer, key, value)
        self.cache.commit(rows_of(kind, position, frame, row, col, position))
        self.seq += count

    def keys(self, content, position):
        angle = position[:, None] * INV_FREQ
        first, second = content[..., : DIM // 2], content[..., DIM // 2 :]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
        )

    def frame(self, noise=0.3):
        rows, cols = self.grid
        content = self.base + noise * self.random.normal(size=self.base.shape)
        row, col = np.divmod(np.arange(rows * cols), cols)
        self.append(Kind.VISION, rows * cols, [self.frames] * (rows * cols), row, col, content)
        self.frames += 1

    def heads(self, layer):
        """The vision tokens of a layer as the reference wants them."""
        cache = self.cache
        return [
            [
                {
                    "seq": int(cache.seq(layer)[h, s]),
                    "frame": int(cache.frame(layer)[h, s]),
                    "row": int(cache.row(layer)[h, s]),
                    "col": int(cache.col(layer)[h, s]),
                    "position": int(cache.position(layer)[h, s, 0]),
                    "key": cache.key(layer)[h, s],
                    "value": cache.value(layer)[h, s],
                }
                for s in range(cache.lengths[layer])
                if cache.kind(layer)[h, s] == Kind.VISION
            ]
            for h in range(HEADS)
        ]


def write(cache, layer, key, value):
    """Write the reserved rows of a layer through its raw addresses, as an engine does: [Hkv, n, D]."""
    import ctypes

    buffer = cache.buffers()[layer]
    start, count = int(cache.lengths[layer]), key.shape[1]
    for address, rows in ((buffer.key_address, key), (buffer.value_address, value)):
        memory = (ctypes.c_float * int(np.prod(buffer.shape))).from_address(address)
        np.ctypeslib.as_array(memory).reshape(buffer.shape)[0, :, start : start + count] = rows


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
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[case[0] for case in CASES])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_keeps_what_the_reference_keeps(text, expected, data):
    grid = data.draw(st.sampled_from([(2, 2), (3, 2), (1, 5), (4, 4)]), label="grid")
    per_frame = grid[0] * grid[1]
    budget = data.draw(st.integers(per_frame, 12 * per_frame), label="budget")  # any remainder
    layers = data.draw(st.integers(1, 5), label="layers")
    filled = Filled(layers, budget, grid, np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed")))
    policy = create_policy(text)
    policy.attach(budget, StreamShape(layers, per_frame, PREFIX))
    for _ in range(3 * budget // per_frame + 2):
        compress(filled, policy, budget, per_frame, expected)
        filled.frame()


@pytest.mark.parametrize("content", ["zero", "equal", "huge"])
def test_adversarial_content(content):
    """Zero vectors, equal scores and huge norms: ties go to the newer token, exactly |C| stay."""
    budget, grid = 24, (2, 2)
    filled = Filled(3, budget, grid, np.random.default_rng(1))
    policy = create_policy("infinipot-v:keys=rotated")  # as stored: bit-equal rows have bit-equal scores
    policy.attach(budget, StreamShape(3, 4, PREFIX))
    value = {"zero": 0.0, "equal": 1.0, "huge": 1e18}[content]
    for _ in range(20):
        cache = filled.cache
        plan = policy.before_append(cache, 4, None)
        if plan is not None:
            for layer, mask in enumerate(plan.keep):
                assert (mask.sum(1) == PREFIX + 18).all()
                expected = reference.select(
                    filled.heads(layer), layer, 3, budget, 4, 18, INV_FREQ, rotated=True
                )  # fmt: skip
                if content == "zero":
                    for head in range(HEADS):
                        vision = cache.kind(layer)[head] == Kind.VISION
                        assert set(cache.seq(layer)[head][mask[head] & vision].tolist()) == expected[head]
            cache.evict(plan.keep)
        filled.cache.reserve(4)
        for layer in range(3):
            constant = np.full((HEADS, 4, DIM), value)
            write(filled.cache, layer, constant, constant)
        seq = np.arange(filled.seq, filled.seq + 4)
        filled.cache.commit(rows_of(Kind.VISION, seq, [filled.frames] * 4, [0, 0, 1, 1], [0, 1, 0, 1], seq))
        filled.seq += 4
        filled.frames += 1


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
