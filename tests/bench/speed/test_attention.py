"""The bench of the attention kernel: what its lines compare."""

import json

from typer.testing import CliRunner

from edgevlm.cli import app


def test_each_precision_beside_onnx_runtime():
    command = ["bench", "speed", "attention", "--model", "seeded-135m", "--held", "20", "--tokens-per-frame", "3"]
    done = CliRunner().invoke(app, [*command, "--rounds", "1", "--json"], catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ours = ["fp32", "fp16", "int8"]
    assert [line["kv"] for line in lines] == [*(["fp32", "fp32", *ours, *ours]) * 2]
    assert [line["rows"] for line in lines] == [1] * 8 + [3] * 8
    assert all(line["ratio"] > 0 for line in lines if line.get("against") == "GroupQueryAttention")


def test_a_shape_that_is_not_known():
    done = CliRunner().invoke(app, ["bench", "speed", "attention", "--model", "seeded-9b"])
    assert "choose from seeded-0.5b" in str(done.exception or done.output)
