"""The rules by which a policy and a tau are chosen, on planted values."""

import numpy as np
import pytest

from edgevlm.calib.accuracy.select_policy import TAUS, MeasuredCandidate, best_trial, select_append, select_policy
from edgevlm.calib.intervals import mean, mean_difference
from edgevlm.runtime.calibration import AppendTrial, Candidate
from edgevlm.runtime.opening import FALLBACK

CLUSTERS, EACH = 40, 6


def measured(policy, values, compress_ms):
    return MeasuredCandidate(Candidate(policy, 64, 0.0, 0.0, 0.0, compress_ms, 1), values)


def planted(lead, noise, seed):
    """Values around 0, all clusters ``lead`` better."""
    shared = np.random.default_rng(7).normal(size=(CLUSTERS, EACH))
    own = np.random.default_rng(seed).normal(size=(CLUSTERS, EACH))
    return (lead + shared + noise * own).tolist()


def test_a_policy_that_is_clearly_best_wins_however_slow():
    assert select_policy([measured("fast", planted(0, 0.1, 1), 1), measured("best", planted(0.5, 0.1, 2), 99)]) == "best"


def test_among_those_that_cannot_be_told_from_the_best_the_fastest_wins():
    slow_best, level = measured("best", planted(0.02, 1.0, 2), 50), measured("level", planted(0, 1.0, 3), 5)
    assert mean(slow_best.values).value > mean(level.values).value
    assert select_policy([slow_best, level, measured("worse", planted(-1, 0.1, 4), 1)]) == "level"


def test_pairs_tell_apart_what_intervals_of_each_alone_do_not():
    """What clusters share is wide; the difference is small and the same everywhere."""
    ahead, behind = measured("ahead", planted(0.05, 0.01, 2), 50), measured("behind", planted(0, 0.01, 3), 1)
    assert mean(ahead.values).low < mean(behind.values).value
    assert select_policy([ahead, behind]) == "ahead"


@pytest.mark.parametrize(("clusters", "chosen"), [(1, None), (2, None), (5, "random")])
def test_few_clusters_tell_nothing_apart(clusters, chosen):
    """However small the normal interval of what they have in common."""
    slightly = [[0.1 * (1 + number % 2)] * 6 for number in range(clusters)]
    field = [measured("random", slightly, 1), measured(FALLBACK, [[0.0] * 6] * clusters, 9)]
    assert select_policy(field) == chosen


def test_a_mean_is_that_of_all_values_and_its_interval_the_ratio_estimators():
    clusters = [[1.0, 2.0, 3.0], [5.0], []]
    found = mean(clusters)
    deviations = [6 - 2.75 * 3, 5 - 2.75]
    half = 1.959964 * (sum(d * d for d in deviations) * 2 / 1 / 16) ** 0.5
    assert (found.value, found.high - found.value, found.clusters, found.count) == (2.75, pytest.approx(half), 2, 4)
    shifted = [[value + 0.5 for value in cluster] for cluster in clusters]
    paired = mean_difference(shifted, clusters)
    assert (paired.value, paired.low, paired.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="same number of questions"):
        mean_difference(clusters, clusters[:2])


def trial(tau, appended, lost, clusters=40):
    """A trial that loses a fraction of the answers, spread evenly."""
    losses = np.zeros((clusters, 25))
    losses.flat[: round(lost * losses.size)] = 1
    return AppendTrial(tau, appended, lost, lost, lost), losses.reshape(25, -1).T.tolist()


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(0.999, 0.4, 0), trial(0.99, 0.3, 0), trial(0.97, 0.2, 0.5)], 0.99),
        ([trial(0.999, 0.4, 0.5), trial(0.99, 0.3, 0.6)], None),
        ([trial(0.999, 0.95, 0)], None),  # saves nothing
        ([trial(0.999, 0.4, 0.048)], None),  # within the bound, but not surely
        ([trial(0.999, 0.4, 0, clusters=1)], None),
        ([trial(0.999, 0.4, 0, clusters=2)], None),
    ],
)
def test_the_largest_saving_that_surely_loses_little(trials, chosen):
    best = best_trial(*zip(*trials, strict=True), "appended")
    assert (best and best.tau) == chosen


def test_agreement_loses_the_tokens_that_differ():
    def record(same, appended):
        return {"appended": appended, "top1": [[True] * 40, [True] * 39 + [same]] * 4}

    found = select_append([[record(True, 0.5)], [record(True, 0.4)], [record(False, 0.3)], [record(False, 0.2)]])
    assert found.tau == 0.95
    assert [of.loss for of in found.trials] == [0, 0, 0.0125, 0.0125]
    assert select_append([[{"appended": 0.2, "top1": [[False] * 40] * 8}]] * len(TAUS)).tau is None
