"""``edgevlm export --rounding gptq`` that was stopped goes on behind what it had finished, and makes the same bytes."""

from pathlib import Path

import pytest

from edgevlm.apps.bundles import gptq
from edgevlm.export import decoder, vision
from edgevlm.export.precisions import layouts

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}
PROBE = 8  # rows, at the most, of what shows how a layout lies in files
LAYER, TEXT = "decoder layer 3 of 3", "running the model over text"
STAGES = {  # (the step that it is stopped at, and at what time of it), then what is done again: towers, samples, layers rounded
    "the fp32 bundle": ((LAYER, 1), (1, 1, [0, 1, 2])),
    "its run over text": ((TEXT, 1), (1, 1, [0, 1, 2])),
    "the rounded bundle": ((LAYER, 2), (0, 0, [2])),
}


def export(checkpoint, out, stop=("", 0), notify=None):
    """Export, until a step begins for the so manieth time."""
    steps = []

    def progress(step):
        steps.append(step)
        if (step, steps.count(step)) == stop:
            raise KeyboardInterrupt

    return gptq.export_by_gptq(checkpoint, out, precision="int4-zp", progress=progress, force=False, notify=notify)


def watched(monkeypatch, module, name, of=lambda *arguments: arguments):
    """What is made ``of`` the arguments of each call of a function that is left as it is."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: (calls.append(of(*given)), function(*given, **named))[1])
    return calls


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(exported, tmp_path_factory) -> Path:
    return export(exported("llava", **SHAPE).checkpoint, tmp_path_factory.mktemp("rounded") / "out")


@pytest.mark.parametrize(("stop", "again"), STAGES.values(), ids=STAGES)
def test_it_goes_on_where_it_was_stopped(exported, undisturbed, tmp_path, monkeypatch, stop, again):
    checkpoint, said = exported("llava", **SHAPE).checkpoint, []
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "out", stop, said.append)
    assert said == ["stopped; the same command goes on from here"]
    assert len(list(tmp_path.iterdir())) == 1
    towers = watched(monkeypatch, vision, "write_vision")
    samples = watched(monkeypatch, gptq.activations, "sample_activations")
    layers = watched(monkeypatch, decoder, "hessian", lambda samples, layer, matrix: layer)
    rounded = watched(monkeypatch, layouts, "gptq", lambda weight, *_: weight)
    export(checkpoint, tmp_path / "out", notify=said.append)
    assert said[1] == "going on with what an export that was stopped has finished"
    assert (len(towers), len(samples), sorted(set(layers))) == again
    assert all(weight.any() for weight in rounded if len(weight) > PROBE), "zeros of a finished layer"
    assert contents(tmp_path / "out") == contents(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
