"""What every policy with a reference does on odd budgets and contents, and alike on every device."""

import numpy as np
import pytest
from cuda_backend import DEVICES, backend
from policies.filled import PREFIX, Filled, play, told
from policies.references import REFERENCES

from edgevlm.runtime.policies import POLICIES, Guidance, StreamShape, create_policy, layers_of
from edgevlm.runtime.policies.retrieval import Retrieval

of_every_policy = pytest.mark.parametrize("text", list(REFERENCES))


def opened(text, budget, storage, seed):
    """Three layers of frames of four tokens; ``storage``: dtype of the cache, axes of its positions."""
    policy = create_policy(text)
    policy.attach(budget, StreamShape(3, 4, PREFIX))
    filled = Filled(3, budget + 4, (2, 2), np.random.default_rng(seed), *storage)
    return policy, filled, REFERENCES[text](filled, budget)


@of_every_policy
def test_less_than_a_frame_one_frame_and_no_whole_number(text):
    for budget in (1, 4, 11):
        policy, filled, expected = opened(text, budget, ("fp32", 3), seed=4)
        assert play(filled, policy, [1] * 6, *expected, reindex_every=2) >= 3, budget


@of_every_policy
def test_layers_of_different_length(text):
    """A layer that has lost rows on its own is compressed to the same target, or not at all where it holds no more."""
    policy, filled, expected = opened(text, 26, ("int8", 3), seed=2)
    for layer, lost in ((1, 2), (2, 7), (0, 5), (1, 12)):
        play(filled, policy, [1] * 5, *expected)
        filled.lose(layer, lost)
    assert play(filled, policy, [1] * 5, *expected)


@of_every_policy
def test_a_patch_of_zeros_or_of_huge_numbers(text):
    for norm, storage in ((0.0, ("fp16", 1)), (100.0, ("int8", 3))):
        policy, filled, expected = opened(text, 18, storage, seed=3)
        filled.base[:, :, 0] *= norm
        filled.noise = 0.2
        assert play(filled, policy, [1] * 8, *expected, reindex_every=2), norm


LAYERS, BUDGET, GRID, CHUNK = 4, 60, (3, 4), 2

NAMES = [name for name, policy in POLICIES.items() if policy.bounded and not issubclass(policy, Retrieval)]


@pytest.fixture(params=DEVICES)
def where(request):
    backend(request.param)
    return request.param


def stream(text, where, dtype, axes, monkeypatch):
    """What each layer and head holds, by seq, after each of five compressions, one re-indexing among them."""
    monkeypatch.setattr(Filled, "where", where)
    random = np.random.default_rng(4)
    filled, policy = Filled(LAYERS, 2 * BUDGET, GRID, random, dtype, axes), create_policy(text)
    policy.attach(BUDGET, StreamShape(LAYERS, GRID[0] * GRID[1], PREFIX))
    rows, held = CHUNK * GRID[0] * GRID[1], []
    while len(held) < 5:
        queries = {layer: random.normal(size=(4, 6, 8)).astype(np.float32) for layer in range(LAYERS)}
        keys = {layer: random.normal(size=(2, 6, 8)).astype(np.float32) for layer in range(LAYERS)}
        plan = policy.before_append(filled.cache, rows, lambda q=queries, k=keys: Guidance(q, k, (2, 2, 2)))
        if plan is not None:
            filled.cache.evict(plan.keep)
            for layer, new in plan.add.items():
                filled.cache.append(layer, new.key, new.value, new.rows)
            held.append([np.sort(filled.cache.seq(layer), 1) for layer in range(LAYERS)])
            if len(held) == 3:
                filled.reindex()
        policy.after_append(layers_of(filled.cache), told(policy, filled.frame(count=CHUNK)))
    return held, [filled.cache.dequantize("key", layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("text", NAMES)
def test_the_same_rows_stay(where, text, axes, monkeypatch):
    dtype = "fp16" if axes == 3 else "fp32"
    (mine, my_keys), (theirs, their_keys) = (stream(text, place, dtype, axes, monkeypatch) for place in (where, "cpu"))
    for found, expected in zip(mine, theirs, strict=True):
        for layer in range(LAYERS):
            np.testing.assert_array_equal(found[layer], expected[layer])
    for found, expected in zip(my_keys, their_keys, strict=True):
        np.testing.assert_allclose(found, expected, atol=8e-3 if dtype == "fp16" else 4e-6)
