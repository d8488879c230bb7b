"""The bench of towers on a tiny one: what its lines compare."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from edgevlm.bench.speed import vision as bench
from edgevlm.cli import app

TINY = bench.TimedTower(
    family="llava_onevision",
    vision={
        "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "vision_use_head": False,
    },
    depth="num_hidden_layers",
    side=56,
    reference="SiglipVisionModel",
)  # fmt: skip


def test_both_precisions_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TOWERS, "tiny", TINY)
    command = ["bench", "speed", "vision", "--tower", "tiny", "--layers", "2", "--frames", "1,3", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    runs = [(line["runtime"], line["precision"]) for line in lines]
    each = [("edgevlm", "fp32"), ("edgevlm", "int8"), ("transformers", "fp32")]
    assert runs == [*(each + each[:2]) * 2, ("edgevlm", "int8")]
    assert [line["batch"] for line in lines if "ms_per_frame" in line] == [1] * 3 + [3] * 3
    assert {line["layers"] for line in lines} == {2}
    assert 0.99 < lines[-1]["cosine"] < 1
    assert 0 < lines[-1]["max_error"] < 0.5
