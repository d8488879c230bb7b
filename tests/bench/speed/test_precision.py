"""The bench of precisions on a tiny checkpoint: what it says of float32 itself, and of numbers that are rounded."""

import json

import checkpoints
import pytest
from typer.testing import CliRunner

from edgevlm.cli import app


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision") / "checkpoint"
    checkpoint = checkpoints.make_checkpoint(folder, layers=2, heads=4, kv_heads=2, side=2, vision_layers=1, scale=4.0)
    command = f"bench speed precision --model {checkpoint} --precisions fp32,fp16,int8,int4,int4+gptq --tokens 140 --threads 1"
    done = CliRunner().invoke(app, [*command.split(), "--json"], catch_exceptions=False)
    return {line["precision"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_float32_is_itself_and_the_rest_is_near(lines):
    assert list(lines) == ["fp32", "fp16", "int8", "int4", "int4+gptq"]
    assert (lines["fp32"]["top1"], lines["fp32"]["kl"], lines["fp32"]["size_over_fp32"]) == (1, 0, 1)
    for line in lines.values():
        assert (line["bench"], line["model"], line["tokens"], line["threads"]) == ("precision", "checkpoint", 140, 1)
        assert line["ms_per_token"] > 0 < line["fp32_ms_per_token"]
    assert lines["fp16"]["kl"] <= lines["int8"]["kl"] < lines["int4"]["kl"] < 10
    assert lines["int4"]["top1"] < 1
    assert lines["int4+gptq"]["kl"] != lines["int4"]["kl"]
    sizes = [lines[name]["decoder_mb"] for name in ("int4", "int8", "fp16", "fp32")]
    assert sizes == sorted(sizes)
