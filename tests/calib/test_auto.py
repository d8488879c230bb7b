"""``auto`` runs what the bundle's calibration chose, and says which and why; without a choice it says how to get one."""

import shutil
from dataclasses import replace

import pytest

from edgevlm.calib import write_calibration
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import CHOICES as FILE
from edgevlm.runtime.calibration import AppendChoice, AppendTrial, Candidate, Choice, Choices
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.session import Session

KNOWN = tuple(name for name, policy in POLICIES.items() if policy.bounded)
HERMES = Candidate("hermes", 60, 0.25, 0.2, 0.3, 9.5, 1000, 0.75)
UNIFORM = Candidate("uniform", 64, 0.5, 0.4, 0.6, 1.5, 1000, 0.5)
CHOICES = Choices(
    edgevlm="0.1.0", date="2026-11-21T14:00:00+00:00", measure="kl", watched=("a.mp4",), frames=20, known=KNOWN,
    budgets=(
        Choice(64, "hermes", (HERMES, UNIFORM), (("purekv", "equal bytes leave 3 tokens"),)),
        Choice(160, "uniform", (replace(HERMES, value=0.6), UNIFORM), ()),
    ),
)  # fmt: skip


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture
def opened(copy, made_up):
    """``opened(choices, budget)``: a session under auto, on a bundle whose calibration has these choices."""
    sessions = []

    def open_session(choices, budget=None):
        write_calibration(Bundle.load(copy), made_up(), choices)
        sessions.append(Session.open(copy, policy="auto", budget=budget))
        return sessions[-1]

    yield open_session
    for session in sessions:
        session.close()


def test_a_chosen_policy_that_takes_whole_frames_gets_them(opened):
    append = AppendChoice(0.99, 0.02, (AppendTrial(0.99, 0.2, 0.0, 0.0, 0.0),))
    whole = Choice(64, "purekv:st_spattn=on", (replace(UNIFORM, policy="purekv:st_spattn=on"),), ())
    choices = replace(CHOICES, budgets=(whole, *CHOICES.budgets[1:]), append=append)
    assert Choices.from_json(choices.to_json()) == choices
    assert opened(choices, 64)._stream.references is None
    assert opened(choices, 160)._stream.references.settings.tau == 0.99


def test_choices_alone_leave_the_layers_as_they_were(copy, made_up):
    write_calibration(Bundle.load(copy), choices=CHOICES)
    assert Bundle.load(copy).calibration() is None, "policies go on running on presets"
    assert Bundle.load(copy).choices() == CHOICES
    write_calibration(Bundle.load(copy), made_up())
    assert Bundle.load(copy).choices() is None, "they were made on other layers"
    assert not (copy / FILE).exists()


@pytest.mark.parametrize(
    ("budget", "policy", "at"), [(64, "hermes", 64), (100, "hermes", 64), (110, "uniform", 160), (None, "uniform", 160)]
)
def test_the_choice_at_the_nearest_budget_is_run(opened, budget, policy, at):
    """Nearest by ratio: 101 lies between 64 and 160."""
    session = opened(CHOICES, budget)
    assert session.policy == policy
    assert session._stream.policy.name == policy
    near = "" if budget == at else f" at budget {at}"
    first, numbers, *rest = session.basis.split("; ")
    assert (
        first
        == f"auto: {policy} at budget {session._stream.budget}, among the best on streams of {CHOICES.frames} frames{near}"
    )
    assert numbers == f"KL from full KV {'0.250 nats [0.200, 0.300]' if policy == 'hermes' else '0.500 nats [0.400, 0.600]'}"
    assert [line.startswith("hermes: calibrated 2026-11-21") for line in rest[:1]] == [True] * (policy == "hermes")


def test_without_a_choice_it_is_infinipot_and_says_how_to_measure(bundle):
    with Session.open(bundle, policy="auto", budget=64) as session:
        assert session.policy == "infinipot-v"
        lead = f"auto: infinipot-v at budget 64, because no policy was measured on this model (edgevlm calibrate {bundle})"
        assert session.basis.startswith(f"{lead}; infinipot-v: default thresholds")
