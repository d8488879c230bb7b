"""Precisions of weights, tower and cache in one bundle, as they are typed: made, run, resumed and calibrated."""

import json
from pathlib import Path

import checkpoints
import cv2
import numpy as np
import pytest
from typed import edgevlm

from edgevlm.apps.bundles import gptq
from edgevlm.export import decoder, vision
from edgevlm.export.precisions import layouts

TOGETHER = {
    "int8 cache, int4 by GPTQ": ["--precision", "int4", "--rounding", "gptq", "--kv", "int8"],
    "all of int8": ["--precision", "int8", "--kv", "int8", "--vision-precision", "int8"],
}


def lines(*arguments: object) -> list[dict]:
    """Of ``edgevlm ARGUMENTS``."""
    done = edgevlm(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "square.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 4.0, (64, 64))
    for index in range(120):
        frame = np.full((64, 64, 3), 40, np.uint8)
        frame[index % 40 :][:20, 10:30] = (2 * index, 255 - 2 * index, 128)
        writer.write(frame)
    writer.release()
    return path


@pytest.mark.parametrize("options", TOGETHER.values(), ids=TOGETHER)
def test_one_bundle_of_several_precisions(options: list[str], video: Path, tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path / "checkpoint", "llava_onevision", max_positions=1024)
    bundle = tmp_path / "bundle"
    lines("export", tmp_path / "checkpoint", "--out", bundle, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "checkpoint"], "nothing else is left"
    asked = ("run", "--video", video, "--model", bundle, "--ask", "what is it?", "--json")
    *found, summary = lines(*asked, "--budget", 160, "--policy", "purekv:st_spattn=on", "--state", tmp_path / "state")
    assert [line["event"] for line in found if line["event"] != "stats"] == ["answer"]
    assert summary["compressions"] > 0
    found = lines("calibrate", bundle, "--video", video, "--policies", "uniform,last-seen", "--budget", "25%", "--json")
    (choice,) = (line for line in found if line["event"] == "choice")
    assert [line["event"] for line in found if line["event"].endswith("_choice")] == ["append_choice", "encode_choice"]
    *_, summary = lines(*asked, "--budget", choice["budget"])
    assert summary["policy"] == choice["policy"], "auto"


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
