"""The rule by which tau is chosen, on planted losses."""

import numpy as np
import pytest

from edgevlm.calib.accuracy.select_policy import TAUS, best_trial, select_append
from edgevlm.runtime.calibration import AppendTrial

CLUSTERS, EACH = 40, 25


def trial(tau, appended, lost, clusters=CLUSTERS):
    """A trial that loses a fraction of the answers, spread evenly."""
    losses = np.zeros((clusters, EACH))
    losses.flat[: round(lost * losses.size)] = 1
    return AppendTrial(tau, appended, lost, lost, lost), losses.reshape(EACH, -1).T.tolist()


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
