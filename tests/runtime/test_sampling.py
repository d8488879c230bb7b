"""Greedy and nucleus sampling against the distribution they promise."""

import numpy as np
import pytest

from edgevlm.errors import UserError
from edgevlm.runtime.sampling import Sampler

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def test_greedy_takes_the_highest():
    assert Sampler()(LOGITS[::-1].copy()) == 3


def test_the_seed_fixes_the_draws():
    first, second = (Sampler(temperature=1.0, seed=5) for _ in range(2))
    assert [first(LOGITS) for _ in range(50)] == [second(LOGITS) for _ in range(50)]


@pytest.mark.parametrize(
    ("top_p", "expected"), [(1.0, [0.5, 0.3, 0.15, 0.05]), (0.75, [0.625, 0.375, 0, 0]), (0.4, [1, 0, 0, 0])]
)
def test_nucleus_frequencies(top_p, expected):
    sampler = Sampler(temperature=1.0, top_p=top_p, seed=0)
    counts = np.bincount([sampler(LOGITS) for _ in range(4000)], minlength=4) / 4000
    assert np.allclose(counts, expected, atol=0.03)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"top_k": 2}, [0.625, 0.375, 0, 0]), ({"min_p": 0.5}, [0.625, 0.375, 0, 0]), ({"top_k": 1, "min_p": 1}, [1, 0, 0, 0])],
)
def test_the_likeliest_alone(settings, expected):
    sampler = Sampler(temperature=1.0, seed=0, **settings)
    counts = np.bincount([sampler(LOGITS) for _ in range(4000)], minlength=4) / 4000
    assert np.allclose(counts, expected, atol=0.03)


def test_temperature_sharpens():
    cold = Sampler(temperature=0.25, seed=0)
    assert np.mean([cold(LOGITS) == 0 for _ in range(2000)]) > 0.85  # .5^4 / sum of fourth powers is .88


def test_a_temperature_next_to_zero_is_greedy():
    assert Sampler(temperature=1e-320, seed=0)(LOGITS[::-1].copy()) == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"), ({"seed": -1}, "seed"), ({"top_k": -1}, "top_k"), ({"min_p": 2}, "min_p"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        Sampler(**settings)
