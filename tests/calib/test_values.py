"""Thresholds split the layers' variation into quarters, and the policy then uses the window of each quarter."""

import numpy as np
import pytest

from edgevlm.calib.layers import thresholds
from edgevlm.errors import UserError
from edgevlm.runtime.policies import StreamShape, create_policy
from edgevlm.runtime.policies.infinipot_v import WINDOWS, variation


def norms_of(cv, count=2000):
    """Value norms ``[2, n]`` of mean 1 whose coefficient of variation is ``cv``."""
    return np.tile([[1 - cv], [1 + cv]], (1, count)).astype(np.float32)


def windows(text, cvs, calibration=None):
    policy = create_policy(text)
    policy.attach(64, StreamShape(len(cvs), 4, 3, calibration=calibration))
    return [policy._window(layer, norms_of(cv)) for layer, cv in enumerate(cvs)]


def test_variation_is_sigma_over_mu():
    assert variation(norms_of(0.3)) == pytest.approx(0.3)
    assert variation(7 * norms_of(0.3)) == pytest.approx(0.3)
    assert variation(np.zeros((2, 4))) == 0


@pytest.mark.parametrize("layers", [4, 5, 6, 7, 24, 28, 33])
def test_variation_that_rises_with_depth_gives_the_preset(layers):
    cvs = np.linspace(0.1, 0.6, layers)
    tau = "/".join(map(repr, thresholds(cvs)))
    assert windows(f"infinipot-v:tau={tau}", cvs) == windows("infinipot-v:tau=preset", cvs)
    assert set(windows("infinipot-v:tau=preset", cvs)) == set(WINDOWS)


def test_no_layer_sits_on_a_border():
    cvs = [0.5, 0.1, 0.3, 0.2, 0.4, 0.45, 0.15, 0.35]
    for tau in thresholds(cvs):
        assert min(abs(tau - cv) for cv in cvs) > 0.01
    tau = thresholds(cvs)
    assert [WINDOWS[np.searchsorted(tau, cv, side="right")] for cv in cvs] == [1, 7, 5, 5, 3, 1, 7, 3]


@pytest.mark.parametrize("cvs", [[0.3], [0.3, 0.2], [0.1, 0.2, 0.3], [0.2] * 8, [0.0] * 4])
def test_few_or_equal_layers_still_give_rising_thresholds(cvs):
    tau = thresholds(cvs)
    assert tau[0] < tau[1] < tau[2]


def test_the_policy_takes_what_was_measured_unless_it_is_set(made_up):
    cvs, measured = (0.1, 0.2, 0.3, 0.4, 0.5), made_up()
    preset = [7, 7, 5, 3, 1]
    assert windows("infinipot-v", cvs) == preset
    assert windows("infinipot-v", cvs[::-1], measured) == [1, 1, 3, 5, 7]
    assert windows("infinipot-v:tau=preset", cvs[::-1], measured) == preset
    assert windows("infinipot-v:tau=0.01/0.02/0.45", cvs, measured) == [3, 3, 3, 3, 1]


def test_it_says_what_it_runs_on(made_up):
    def basis(text, calibration):
        policy = create_policy(text)
        policy.attach(64, StreamShape(5, 4, 3, calibration=calibration))
        return policy.basis

    assert basis("infinipot-v", None).startswith("default thresholds, as the model's layers were not measured")
    assert basis("infinipot-v", made_up()) == "calibrated 2026-11-21 on a.mp4, 10 frames: thresholds 0.15/0.25/0.35"
    assert basis("infinipot-v:tau=preset", made_up()) == "default thresholds, as set"
    assert basis("infinipot-v:tau=1/2/3", made_up()) == "thresholds 1/2/3, as set"
    assert basis("purekv", None) == "default layer, as the model's layers were not measured (edgevlm calibrate)"
    assert basis("purekv", made_up()) == "calibrated 2026-11-21 on a.mp4, 10 frames: clie 0"
    assert basis("purekv:clie=2", made_up()) == "clie 2, as set"
    assert basis("purekv:cross=off", made_up()) == ""
    assert basis("sliding-window", made_up()) == ""


def test_purekv_takes_the_layer_that_was_measured_unless_it_is_set(made_up):
    def probed(text, calibration):
        policy = create_policy(text)
        policy.attach(64, StreamShape(5, 4, 3, calibration=calibration))
        return policy.needs.probe_layers

    measured = made_up(agreement=((None, 0.5, 0.5, 0.5, 0.5),) * 4, clie=3)
    assert probed("purekv", None) == (0, 1, 2)
    assert probed("purekv", measured) == (0, 1, 2, 3)
    assert probed("purekv:clie=1", measured) == (0, 1)
    assert probed("purekv:cross=off", measured) == (0, 1, 2, 3, 4)
    assert probed("snapkv", measured) == (0, 1, 2, 3, 4), "a booster is asked for"


def test_one_policy_attached_again_forgets_the_other_model(made_up):
    policy = create_policy("infinipot-v")
    policy.attach(64, StreamShape(5, 4, 3, calibration=made_up()))
    policy.attach(64, StreamShape(5, 4, 3))
    assert policy._window(4, norms_of(0.01)) == 1


@pytest.mark.parametrize("tau", ["presets", "1/2", "3/2/1", "1/2/x"])
def test_thresholds_that_are_none_are_refused(tau):
    with pytest.raises(UserError, match="policy infinipot-v: "):
        create_policy(f"infinipot-v:tau={tau}")
