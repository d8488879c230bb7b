"""``edgevlm bench speed export``: an export and a trace, each in a process of its own."""

import pytest
from checkpoints import make_checkpoint

from edgevlm.bench.speed import export as module
from edgevlm.bench.speed.export import export, measure
from edgevlm.errors import UserError


def test_each_is_measured_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_module", lambda name, work: measure(work))
    ours, theirs, compared = export([str(make_checkpoint(tmp_path, "llava_onevision"))])
    assert (ours["runtime"], theirs["runtime"]) == ("edgevlm", "transformers")
    assert ours["layer_mb"] == theirs["layer_mb"] > 0
    assert compared["cpu_ratio"] == ours["cpu_s"] / theirs["cpu_s"]
    assert compared["ratio"] == ours["export_s"] / theirs["export_s"]


def test_what_is_measured_is_an_export_and_a_trace(tmp_path):
    checkpoint, out = make_checkpoint(tmp_path / "checkpoint", "llava_onevision"), tmp_path / "out"
    work = {"checkpoint": str(checkpoint), "out": str(out), "precision": "int8"}
    (line,) = measure(work | {"runtime": "edgevlm"})
    assert (out / "bundle.json").exists()
    assert line["peak_mb"] > 0
    list(measure(work | {"runtime": "transformers"}))
    assert (tmp_path / "out.onnx").stat().st_size > 1000


def test_another_family_is_refused(tmp_path):
    with pytest.raises(UserError, match="is of llava, and only llava_onevision checkpoints are compared"):
        next(export([str(make_checkpoint(tmp_path, "llava"))]))
