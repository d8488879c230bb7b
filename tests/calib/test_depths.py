"""HERMES's layer classes: those measured for the model, unless the depths are set."""

import shutil

import pytest

from edgevlm.calib import write_calibration
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import StreamShape, create_policy
from edgevlm.runtime.session import Session


def attached(text, calibration=None):
    policy = create_policy(text)
    policy.attach(64, StreamShape(5, 4, 3, calibration=calibration))
    return policy


def classes(policy):
    return [policy._class(layer) for layer in range(5)]


def test_the_policy_takes_what_was_measured_unless_a_depth_is_set(made_up):
    measured = made_up(middle_from=2, deep_from=4)
    assert classes(attached("hermes")) == [1, 1, 1, 2, 2]
    assert classes(attached("hermes", measured)) == [0, 0, 1, 1, 2]
    assert classes(attached("hermes:shallow=0.1,deep=0.7", measured)) == [1, 1, 1, 2, 2]
    assert classes(attached("hermes:shallow=0.4", measured)) == [0, 0, 1, 2, 2]
    assert classes(attached("hermes:deep=0.2", measured)) == [1, 2, 2, 2, 2]


def test_guidance_budgets_and_smoothing_follow_the_measured_classes(made_up):
    policy = attached("hermes:layer_weights=1/1/2", made_up(middle_from=2, deep_from=4))
    assert policy.needs.guidance_layers == (2, 3, 4)
    assert policy.layer_budgets.tolist() == [53, 53, 53, 53, 108]
    assert attached("hermes", made_up(middle_from=5, deep_from=5)).needs.guidance == ()


def test_it_says_what_it_runs_on(made_up):
    measured = made_up(middle_from=2, deep_from=4)
    preset = "default depths, middle from layer 0, deep from 3, as the model's layers were not measured (edgevlm calibrate)"
    assert attached("hermes").basis == preset
    assert attached("hermes", measured).basis == ("calibrated 2026-11-21 on a.mp4, 10 frames: middle from layer 2, deep from 4")
    assert attached("hermes:shallow=0.4", measured).basis == "middle from layer 2, deep from 3, as set"


def test_one_policy_attached_again_forgets_the_other_model(made_up):
    policy = attached("hermes", made_up(middle_from=2, deep_from=4))
    policy.attach(64, StreamShape(5, 4, 3))
    assert classes(policy) == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_session_says_it(bundle, tmp_path, made_up, calibrated):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    if calibrated:
        write_calibration(Bundle.load(copy), made_up(middle_from=2, deep_from=4))
    with Session.open(Model.load(copy, threads=1), budget=64, policy="hermes") as session:
        assert session._stream.policy.needs.guidance_layers == tuple(range(2 if calibrated else 0, 5))
        assert session.basis.startswith(
            "hermes: calibrated 2026-11-21" if calibrated else "hermes: default depths, middle from layer 0"
        )
