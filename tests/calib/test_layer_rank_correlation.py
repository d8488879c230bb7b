"""Spearman's correlation by its textbook formula, and a planted layer that agrees."""

import numpy as np
import pytest

from edgevlm.calib.layers import best_clie_layer, layer_rank_correlation, ranks, spearman


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


def test_ties_share_their_mean_rank():
    assert ranks(np.array([10, 20, 10, 30, 20, 20])).tolist() == [1.5, 4, 1.5, 6, 4, 4]
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 3, 2, 4])) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman(np.ones(5), np.arange(5)) == 0


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


def test_value_norms_weigh_both_sides():
    """Constant attention: both rankings are the norms' own, so they agree wholly (eqs. 3 and 4)."""
    norms = [np.random.default_rng(layer).uniform(1, 2, (1, 50)) for layer in range(2)]
    mass = [np.full((1, 50), 0.5), np.full((1, 50), 0.25)]
    assert layer_rank_correlation(mass, norms) == [[None, pytest.approx(1)]]


def test_one_layer_has_none_to_agree_with():
    assert layer_rank_correlation([np.ones((1, 5))], [np.ones((1, 5))]) == [[None]]
    assert best_clie_layer([[None]]) == 0
