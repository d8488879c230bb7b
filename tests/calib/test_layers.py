"""Attention planted with a known decay and pattern gives the planted classes; each rule is met and missed."""

import itertools

import numpy as np
import pytest

from edgevlm.calib.layers import (
    ages,
    best_clie_layer,
    boundaries,
    classify,
    layer_rank_correlation,
    newest_tenth,
    periodicity,
    recency,
    spearman,
)

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


@pytest.mark.parametrize("per_frame", [2, 8, 9])
def test_decay_is_no_pattern_and_a_pattern_survives_decay(per_frame):
    rng = np.random.default_rng(1)
    assert periodicity(planted(30, 1, noise=0, per_frame=per_frame), FRAMES) == 0
    pattern = np.tile(rng.normal(size=per_frame), FRAMES)
    steep = np.exp(pattern) * planted(30, 1, noise=0, per_frame=per_frame)
    assert periodicity(steep, FRAMES) == pytest.approx(1, abs=1e-6)


def test_boundaries_of_classes_in_order_are_theirs():
    names = ("shallow", "middle", "deep")
    for counts in itertools.product(range(4), repeat=3):
        if sum(counts):
            classes = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
            assert boundaries(classes) == (counts[0], counts[0] + counts[1])


def by_hand(a, b):
    """1 - 6 sum d^2 / (n (n^2 - 1)), for values without ties; ranks by counting."""
    n = len(a)
    gaps = [sum(y < x for y in a) - sum(y < w for y in b) for x, w in zip(a, b, strict=True)]
    return 1 - 6 * sum(d * d for d in gaps) / (n * (n * n - 1))


def test_spearman_is_the_textbooks():
    random = np.random.default_rng(0)
    for n in (2, 3, 10, 101):
        a, b = random.normal(size=(2, n))
        assert spearman(a, b) == pytest.approx(by_hand(a, b))
        assert spearman(a, np.exp(3 * a)) == pytest.approx(1)
        assert spearman(a, -a) == pytest.approx(-1)


def test_a_planted_layer_is_found():
    """Layer 1's attention orders tokens as all above do; layers 0 and 2 are noise. Norms differ by layer."""
    random = np.random.default_rng(1)
    truth = random.exponential(size=(2, 300))
    noise = random.exponential(size=(3, 2, 300))
    mass = [noise[0], truth, noise[1]] + [truth * random.uniform(0.9, 1.1, truth.shape) for _ in range(7)]
    norms = [random.uniform(0.8, 1.2, (2, 332)) for _ in mass]
    table = layer_rank_correlation(mass, norms)
    assert len(table) == 6
    assert [[run is None for run in row] for row in table] == [[layer <= c for layer in range(10)] for c in range(6)]
    assert min(table[1][layer] for layer in range(3, 10)) > 0.9
    assert max(abs(table[0][layer]) for layer in range(1, 10)) < 0.4
    assert best_clie_layer([row[:] for row in table[:3]]) == 1
