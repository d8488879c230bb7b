"""The rule by which tau is chosen, on planted losses, and on the demo: what auto appends and encodes, and a kill."""

import numpy as np
import pytest

from edgevlm.apps import calibrate as command
from edgevlm.calib.accuracy import select_changed as module
from edgevlm.calib.accuracy.select_changed import (
    BOUND,
    SETTINGS,
    TAUS,
    append_by_agreement,
    best_trial,
)
from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.engines.onnxruntime_cuda import OnnxRuntimeCuda
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import AppendTrial, Choices
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import AppendChanged

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
        ([trial(0.999, 0.4, 0.018)], None),  # within the bound, but not surely
        ([trial(0.999, 0.4, 0, clusters=1)], None),
        ([trial(0.999, 0.4, 0, clusters=2)], None),
    ],
)
def test_the_largest_saving_that_surely_loses_little(trials, chosen):
    best = best_trial("streamqa", *zip(*trials, strict=True), "appended")
    assert (best and best.tau) == chosen


def test_agreement_loses_the_tokens_that_differ():
    def record(same, appended):
        return {"appended": appended, "top1": [[True] * 40, [True] * 39 + [same]] * 4}

    records = [[record(True, 0.5)], [record(True, 0.4)], [record(False, 0.3)], [record(False, 0.2)]]
    found = append_by_agreement(records)
    assert found.tau == 0.95
    assert [of.loss for of in found.trials] == [0, 0, 0.0125, 0.0125]
    none = [[{"appended": 0.2, "top1": [[False] * 40] * 8}]] * len(TAUS)
    assert append_by_agreement(none).tau is None


def calibrate(out, said):
    comparison = command.parse_comparison("uniform", "25%", "streamqa", (), 5)
    request = command.CalibrateRequest("demo", [], 24, out, 1, comparison, layers=False)
    return command.start(request, said, lambda what: None)[1]


def test_the_demo_appends_and_encodes_what_was_chosen_and_goes_on_after_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setitem(BOUND, "streamqa", 0.9)
    monkeypatch.setattr(module, "STREAMS", 1)  # as many as the policies are compared on
    out, said = tmp_path / "demo", []

    def stop(what):
        if what.startswith("comparing --append: streams, 8 of"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(out, stop)
    found = calibrate(out, said.append)
    assert next(line for line in said if "--append: streams" in line) == "comparing --append: streams, 8 of 25"
    append = found.policies.append
    assert [of.tau for of in append.trials] == list(TAUS)
    assert append.tau == min(append.trials, key=lambda of: of.appended).tau
    assert append.best.appended < 1
    assert Bundle.load(out).choices() == Choices.from_json(found.policies.to_json()) == found.policies
    encode = found.policies.encode
    assert [of.setting for of in encode.trials] == list(map(str, SETTINGS))
    assert encode.best == min(encode.trials, key=lambda of: of.encoded)
    with Session.open(out, budget=64) as session:
        assert session._stream.references.settings == AppendChanged(append.tau)
        assert str(session._chunk.encoder.settings) == encode.setting
        assert session.basis.split(";")[1:3] == [f" append: {AppendChanged(append.tau)}", f" encode: {encode.setting}"]
    with Session.open(out, budget=64, encode="all") as session:
        assert session._chunk.encoder is None
    monkeypatch.setattr(OnnxRuntimeCpu, "bind_tower", OnnxRuntimeCuda.bind_tower)  # which refuses
    with Session.open(out, budget=64) as session:
        assert session._chunk.encoder is None
