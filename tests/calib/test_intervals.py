"""Intervals against the formula where there is one, against a plain bootstrap of streams where there is none."""

import numpy as np
import pytest

from edgevlm.calib.intervals import difference, fraction_right

Z = 1.959964


def wilson(right, asked):
    p = right / asked
    spread = Z * np.sqrt(p * (1 - p) / asked + Z**2 / (4 * asked**2))
    return tuple((p + Z**2 / (2 * asked) + sign * spread) / (1 + Z**2 / asked) for sign in (-1, 1))


def streams(random, units=150, luck=0.25, base=0.7, most=9):
    """Clusters of unlike sizes whose questions share the luck of their stream."""
    chance = np.clip(base + luck * random.normal(size=units), 0, 1)
    return [(random.random(random.integers(1, most)) < p).tolist() for p in chance]


def bootstrap(right, clusters, random, rounds=4000):
    """The middle 95 % of the sum of ``right``, a number a stream, over all questions, of streams drawn with replacement."""
    drawn = random.integers(len(clusters), size=(rounds, len(clusters)))
    asked = np.array([len(cluster) for cluster in clusters])
    return np.percentile(np.array(right)[drawn].sum(1) / asked[drawn].sum(1), [2.5, 97.5])


def mean_of(clusters):
    return np.mean([answer for cluster in clusters for answer in cluster])


@pytest.mark.parametrize("seed", range(3))
def test_a_share_has_the_interval_that_a_bootstrap_of_streams_gives(seed):
    random = np.random.default_rng(seed)
    clusters = streams(random)
    found = fraction_right(clusters)
    low, high = bootstrap([sum(cluster) for cluster in clusters], clusters, random)
    assert found.value == pytest.approx(mean_of(clusters))
    assert (found.low, found.high) == (pytest.approx(low, abs=0.012), pytest.approx(high, abs=0.012))
    naive = wilson(sum(map(sum, clusters)), found.count)
    assert found.high - found.low > 1.15 * (naive[1] - naive[0]), "clustered questions are worth less than independent ones"


def test_one_question_a_stream_is_wilson():
    answers = [True] * 41 + [False] * 9
    found = fraction_right([[answer] for answer in answers])
    assert (found.low, found.high) == (pytest.approx(wilson(41, 50)[0], abs=2e-3), pytest.approx(wilson(41, 50)[1], abs=2e-3))
    assert (found.clusters, found.count) == (50, 50)


@pytest.mark.parametrize("right", [True, False])
def test_no_error_seen_is_not_no_error(right):
    found = fraction_right([[right] * 5] * 20 + [[]])
    assert (found.value, found.clusters, found.count) == (float(right), 20, 100)
    assert (found.low, found.high) == (pytest.approx(wilson(20 * right, 20)[0]), pytest.approx(wilson(20 * right, 20)[1]))
    assert found.high - found.low > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_paired_difference_has_the_interval_that_a_bootstrap_of_streams_gives(seed):
    random = np.random.default_rng(seed)
    theirs = streams(random)
    ours = [[answer or random.random() < 0.2 for answer in cluster] for cluster in theirs]
    found = difference(ours, theirs)
    low, high = bootstrap([sum(a) - sum(b) for a, b in zip(ours, theirs, strict=True)], ours, random)
    assert found.value == pytest.approx(mean_of(ours) - mean_of(theirs))
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert found.low > 0
    apart = fraction_right(ours).high - fraction_right(ours).low
    assert found.high - found.low < 0.8 * apart, "pairing takes the luck of the streams out"
