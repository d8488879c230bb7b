"""snapkv, h2o and streaming-llm with PureKV's score (``clie``) against the float64 reference, token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.filled import DIM, GROUP, HEADS, PREFIX, Filled, play, told
from policies.reference_attention import Boosted, BoostedH2O

from edgevlm.errors import UserError
from edgevlm.runtime.policies import StreamShape, create_policy

REPRODUCIBLE = settings(max_examples=3, deadline=None, derandomize=True)  # near ties would differ in float32 and float64
NAMES = ["snapkv", "h2o", "streaming-llm"]


def opened(name, layers, budget, grid, seed, clie=1, storage=("fp32", 1)):
    """A boosted policy, its stream, and what of the reference :func:`play` takes."""
    name, _, more = name.partition(":")
    policy = create_policy(f"{name}:clie={clie},{more}" + ",window=4" * (name == "snapkv"))
    policy.attach(budget, StreamShape(layers, grid[0] * grid[1], PREFIX))
    filled = Filled(layers, budget + grid[0] * grid[1], grid, np.random.default_rng(seed), *storage)
    reference = BoostedH2O(filled, clie=clie) if name == "h2o" else Boosted(filled, clie=clie, window=4)
    appended = reference.appended if name == "h2o" else lambda layer, seqs: None
    return policy, filled, reference, (getattr(reference, name.replace("-", "_")), appended)


@pytest.mark.parametrize("storage", [("fp32", 3), ("fp16", 1), ("int8", 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@REPRODUCIBLE
def test_keeps_what_the_reference_keeps(name, storage, data):
    grid = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 5)]), label="grid")
    per_frame = grid[0] * grid[1]
    budget = data.draw(st.integers(1, 8 * per_frame), label="budget")  # less than a frame, any remainder
    clie, seed = data.draw(st.sampled_from([0, 1, 7]), label="clie"), data.draw(st.integers(0, 99), label="seed")
    policy, filled, _, expected = opened(name, 3, budget, grid, seed, clie, storage)
    most = max(1, min(policy.max_append, budget) // per_frame)
    pieces = data.draw(st.lists(st.integers(1, most), min_size=9, max_size=9), label="frames a piece")
    assert play(filled, policy, pieces, *expected, reindex_every=2)


@pytest.mark.parametrize("name", NAMES)
def test_with_sparse_attention_frame_0_stays_and_the_rest_is_as_without_it(name):
    policy, filled, reference, (kept, appended) = opened(f"{name}:st_spattn=on", 3, 30, (2, 2), 4)
    reference.first_frame = True
    assert play(filled, policy, [1, 1, 2, 1, 2] * 4, kept, appended) > 5
    assert all((filled.cache.frame(layer)[:, PREFIX : PREFIX + 4] == 0).all() for layer in range(3))


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_different_length_and_tokens_that_the_clie_layer_dropped(name):
    policy, filled, reference, expected = opened(name, 3, 26, (2, 2), 2)
    for layer, lost in ((1, 7), (2, 5), (1, 12), (0, 6)):
        play(filled, policy, [1] * 5, *expected)
        filled.lose(layer, lost)
    play(filled, policy, [1] * 5, *expected)
    assert reference.from_memory > 50


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("norm", "storage"), [(1e12, ("fp32", 1)), (300.0, ("fp16", 1))])
def test_zero_and_huge_norms_of_a_patch(name, norm, storage):
    policy, filled, _, expected = opened(name, 3, 22, (2, 2), 3, storage=storage)
    filled.base[:, :, 0] *= norm
    assert play(filled, policy, [1] * 12, *expected)


@pytest.mark.parametrize("name", NAMES)
def test_high_layers_are_not_probed_and_what_is_kept_is_counted(name):
    policy, filled, _, _ = opened(name, 5, 40, (2, 2), 0, clie=2)
    assert policy.needs.probe_layers == (0, 1, 2)
    before = policy.state_bytes
    policy.after_append(filled.cache, told(policy, filled.frame()))
    window = 3 * GROUP * HEADS * 4 * DIM * 4 + 4 * (8 + 4)  # three layers' queries of four rows; seq and position
    sums = 3 * HEADS * (44 + PREFIX) * 16
    assert policy.state_bytes - before == (sums if name == "h2o" else window)


def test_streaming_llm_without_a_share_for_important_tokens_is_streaming_llm():
    kept = []
    for text in ("streaming-llm", "streaming-llm:clie=0,important=0"):
        policy = create_policy(text)
        policy.attach(22, StreamShape(2, 4, PREFIX))
        filled = Filled(2, 26, (2, 2), np.random.default_rng(0))
        for _ in range(12):
            if (plan := policy.before_append(filled.cache, 4, None)) is not None:
                filled.cache.evict(plan.keep)
            policy.after_append(filled.cache, told(policy, filled.frame()))
        kept.append([np.sort(filled.cache.seq(layer)).tolist() for layer in range(2)])
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv:clie=-1", "layer from 0 up, or empty"),
        ("h2o:clie=two", "layer from 0 up, or empty"),
        ("streaming-llm:clie=1.5", "layer from 0 up, or empty"),
        ("streaming-llm:important=1", "important must be at least 0 and below 1"),
    ],
)
def test_wrong_settings_are_named(text, says):
    with pytest.raises(UserError, match=says):
        create_policy(text)
