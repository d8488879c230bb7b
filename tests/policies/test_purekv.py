"""PureKV against the float64 reference: which tokens each head keeps, also of those that the CLIE layer has dropped."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.filled import PREFIX, STORAGE, Filled, play
from policies.reference_attention import PureKV

from edgevlm.runtime.policies import StreamShape, create_policy

REPRODUCIBLE = settings(max_examples=8, deadline=None, derandomize=True)  # near ties would differ in float32 and float64


def opened(text, layers, budget, grid, seed, storage=("fp32", 1), **expected):
    policy, per_frame = create_policy(text), grid[0] * grid[1]
    policy.attach(budget, StreamShape(layers, per_frame, PREFIX))
    filled = Filled(layers, budget + per_frame, grid, np.random.default_rng(seed), *storage)
    return policy, filled, PureKV(filled, **expected)


CASES = [
    ("purekv", {}),
    ("purekv:window=4", {"window": 4}),
    ("purekv:clie=0,window=4", {"clie": 0, "window": 4}),
    ("purekv:clie=9,window=6", {"clie": 9, "window": 6}),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[case[0] for case in CASES])
@given(data=st.data())
@REPRODUCIBLE
def test_keeps_what_the_reference_keeps(text, expected, data):
    storage = data.draw(st.sampled_from(STORAGE), label="dtype and axes")
    grid = data.draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (1, 5)]), label="grid")
    per_frame = grid[0] * grid[1]
    budget = data.draw(st.integers(1, 8 * per_frame), label="budget")  # less than a frame, any remainder
    layers, seed = data.draw(st.sampled_from([1, 3, 5]), label="layers"), data.draw(st.integers(0, 99), label="seed")
    policy, filled, reference = opened(text, layers, budget, grid, seed, storage, **expected)
    most = max(1, min(policy.max_append, budget) // per_frame)
    pieces = data.draw(st.lists(st.integers(1, most), min_size=10, max_size=10), label="frames a piece")
    assert play(filled, policy, pieces, reference.expected, reindex_every=2)


def test_a_token_that_the_clie_layer_has_dropped_keeps_its_last_score():
    policy, filled, reference = opened("purekv:clie=0,window=4", 3, 30, (2, 2), 1, clie=0, window=4)
    assert play(filled, policy, [1] * 20, reference.expected) > 5
    assert reference.from_memory > 100
