"""Every policy on what is hard for all: tiny and odd budgets, one frame, layers of different length, zero and huge patches.

In caches of fp32, fp16 and int8, with positions of one and three axes, and after re-indexings.
"""

import numpy as np
import pytest
from policies.filled import PREFIX, STORAGE, Filled, play
from policies.references import REFERENCES

from edgevlm.runtime.policies import StreamShape, create_policy

pytestmark = [pytest.mark.parametrize("storage", STORAGE, ids=str), pytest.mark.parametrize("text", list(REFERENCES))]


def opened(text, budget, storage, seed):
    """Three layers of frames of four tokens."""
    policy = create_policy(text)
    policy.attach(budget, StreamShape(3, 4, PREFIX))
    filled = Filled(3, budget + 4, (2, 2), np.random.default_rng(seed), *storage)
    return policy, filled, REFERENCES[text](filled, budget)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 11])
def test_less_than_a_frame_one_frame_and_no_whole_number(text, storage, budget):
    policy, filled, expected = opened(text, budget, storage, seed=4)
    assert play(filled, policy, [1] * 6, *expected, reindex_every=2) >= 3


def test_layers_of_different_length(text, storage):
    """A layer that has lost rows on its own is compressed to the same target, or not at all where it holds no more."""
    policy, filled, expected = opened(text, 26, storage, seed=2)
    for layer, lost in ((1, 2), (2, 7), (0, 5), (1, 12)):
        play(filled, policy, [1] * 5, *expected)
        filled.lose(layer, lost)
    assert play(filled, policy, [1] * 5, *expected)


@pytest.mark.parametrize("norm", [0.0, 100.0])
def test_a_patch_of_zeros_or_of_huge_numbers(text, storage, norm):
    policy, filled, expected = opened(text, 18, storage, seed=3)
    filled.base[:, :, 0] *= norm
    filled.noise = 0.2
    assert play(filled, policy, [1] * 8, *expected, reindex_every=2)
