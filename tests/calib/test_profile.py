"""Attention planted with a known decay and pattern gives the planted classes; each rule is met and missed."""

import itertools

import numpy as np
import pytest

from edgevlm.calib.layers import ages, boundaries, classify, newest_tenth, periodicity, recency

FRAMES, PER_FRAME = 40, 9


def planted(decay, anchor, noise=0.05, seed=0, per_frame=PER_FRAME):
    """exp(-decay * age) a token, age 0 to 1, token 4 of each frame ``anchor`` times what the others get, log-normal noise."""
    random = np.random.default_rng(seed)
    age = np.linspace(1, 0, FRAMES * per_frame)
    weight = np.where(np.arange(FRAMES * per_frame) % per_frame == 4, anchor, 1.0)
    return weight * np.exp(-decay * age + noise * random.normal(size=len(age)))


def classed(attention):
    age = ages(attention, FRAMES)
    return classify(recency(age), newest_tenth(FRAMES) / FRAMES, periodicity(attention, FRAMES))


@pytest.mark.parametrize(
    ("decay", "anchor", "expected"),
    [
        (20, 1, "shallow"),  # HERMES's own rate of a shallow layer
        (20, 8, "shallow"),  # whatever its pattern
        (4, 1, "middle"),
        (4, 8, "middle"),  # periodic, but it still forgets
        (0, 1, "middle"),  # even, without a pattern
        (0, 8, "deep"),
        (1, 8, "deep"),
    ],
)
def test_planted_layers_get_their_class(decay, anchor, expected):
    assert classed(planted(decay, anchor)) == expected


def test_ages_are_newest_first_and_sum_to_one():
    attention = np.repeat(np.arange(1.0, 5), 3)  # frames 1, 2, 3, 4, three tokens each
    assert ages(attention, 4) == pytest.approx(np.array([4, 3, 2, 1]) / 10)
    assert recency(np.array([0.4] + [0.1] * 6)) == pytest.approx(0.4)


def test_recency_is_that_of_the_exponential():
    age = ages(planted(7, 1, noise=0), FRAMES)
    assert recency(age) == pytest.approx((1 - np.exp(-0.7)) / (1 - np.exp(-7)), abs=0.01)


@pytest.mark.parametrize("per_frame", [2, 8, 9])
def test_decay_is_no_pattern_and_a_pattern_survives_decay(per_frame):
    rng = np.random.default_rng(1)
    assert periodicity(planted(30, 1, noise=0, per_frame=per_frame), FRAMES) == 0
    pattern = np.tile(rng.normal(size=per_frame), FRAMES)
    steep = np.exp(pattern) * planted(30, 1, noise=0, per_frame=per_frame)
    assert periodicity(steep, FRAMES) == pytest.approx(1, abs=1e-6)


def test_a_pattern_of_another_period_is_none_of_a_frame():
    steps = np.arange(FRAMES * PER_FRAME)
    assert periodicity(np.exp(np.cos(2 * np.pi * steps / PER_FRAME)), FRAMES) == pytest.approx(1)
    assert periodicity(np.exp(np.cos(2 * np.pi * steps / (2 * PER_FRAME))), FRAMES) < -0.9
    assert abs(periodicity(planted(0, 1, noise=1), FRAMES)) < 0.15


def test_nothing_to_measure_is_no_pattern():
    assert periodicity(np.full(FRAMES * PER_FRAME, 0.1), FRAMES) == 0
    assert periodicity(np.zeros(FRAMES * PER_FRAME), FRAMES) == 0
    assert periodicity(np.ones(FRAMES), FRAMES) == 0, "one token a frame"


def test_boundaries_of_classes_in_order_are_theirs():
    names = ("shallow", "middle", "deep")
    for counts in itertools.product(range(4), repeat=3):
        if sum(counts):
            classes = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
            assert boundaries(classes) == (counts[0], counts[0] + counts[1])


def test_boundaries_of_disorder_disagree_least():
    s, m, d = "shallow", "middle", "deep"
    assert boundaries([s, s, s, m, s, s, m, m, d, d, m, d, d]) == (6, 8)
    assert boundaries([s, s, d, m, d, d]) == (2, 4), "either side of layer 2 costs one: .7 L is nearer"
    assert boundaries([d, d, d, d]) == (0, 0)
    assert boundaries([s] * 10) == (10, 10)
