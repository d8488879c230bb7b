"""Every policy on what is hard for all: tiny and odd budgets, one frame, layers of different length, zero and huge patches.

In caches of fp32, fp16 and int8, with positions of one or three axes (each policy's own tests have the others), and after
re-indexings.
"""

import numpy as np
import pytest
from policies.filled import PREFIX, Filled, play
from policies.references import REFERENCES

from edgevlm.runtime.policies import StreamShape, create_policy

pytestmark = pytest.mark.parametrize("text", list(REFERENCES))


def opened(text, budget, storage, seed):
    """Three layers of frames of four tokens; ``storage``: dtype of the cache, axes of its positions."""
    policy = create_policy(text)
    policy.attach(budget, StreamShape(3, 4, PREFIX))
    filled = Filled(3, budget + 4, (2, 2), np.random.default_rng(seed), *storage)
    return policy, filled, REFERENCES[text](filled, budget)


def test_less_than_a_frame_one_frame_and_no_whole_number(text):
    for budget in (1, 4, 11):
        policy, filled, expected = opened(text, budget, ("fp32", 3), seed=4)
        assert play(filled, policy, [1] * 6, *expected, reindex_every=2) >= 3, budget


def test_layers_of_different_length(text):
    """A layer that has lost rows on its own is compressed to the same target, or not at all where it holds no more."""
    policy, filled, expected = opened(text, 26, ("int8", 3), seed=2)
    for layer, lost in ((1, 2), (2, 7), (0, 5), (1, 12)):
        play(filled, policy, [1] * 5, *expected)
        filled.lose(layer, lost)
    assert play(filled, policy, [1] * 5, *expected)


def test_a_patch_of_zeros_or_of_huge_numbers(text):
    for norm, storage in ((0.0, ("fp16", 1)), (100.0, ("int8", 3))):
        policy, filled, expected = opened(text, 18, storage, seed=3)
        filled.base[:, :, 0] *= norm
        filled.noise = 0.2
        assert play(filled, policy, [1] * 8, *expected, reindex_every=2), norm
