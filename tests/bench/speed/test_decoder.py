"""The speed benches through the real command, on tiny models: their lines, their ratios and what they refuse."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.bench import seeded
from edgevlm.bench.speed import runtimes
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape

SHAPE = DecoderShape(
    layers=2, heads=4, kv_heads=2, head_dim=32, hidden=64, intermediate=96, vocab=96, norm_eps=1e-6, rope_theta=1e4,
    model_limit=128, tied=True,
)  # fmt: skip
SPREAD = ["low", "high"]
RATIO = ["ratio", *SPREAD, "cpu_ratio"]


@pytest.fixture
def tiny(monkeypatch):
    """``--model demo`` is a tiny llama; llama.cpp is not installed."""
    monkeypatch.setitem(seeded.SHAPES, "demo", ("llama", SHAPE))
    missing = runtimes.RuntimeKind("no_llama:LlamaCpp", ("fp32", "int4"), install="pip install llama-cpp-python")
    monkeypatch.setitem(runtimes.RUNTIMES, "llama.cpp", missing)


def bench(*command):
    return CliRunner().invoke(app, ["bench", "speed", *command, "--rounds", "2"], catch_exceptions=False)


def test_decode(tiny):
    command = ["decode", "--model", "demo", "--held", "9,5", "--precisions", "fp32,int4", "--kv", "fp32"]
    done = bench(*command, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    timed, ratios = lines[:-2], lines[-2:]
    place = ["bench", "schema", "runtime", "model", "threads", "precision", "context", "kv"]
    assert all(list(line) == [*place, "ms_per_token", *SPREAD, "cpu_ms_per_token", "read_mb"] for line in timed)
    assert [(line["runtime"], line["precision"], line["context"]) for line in timed] == [
        ("edgevlm", "fp32", 5), ("transformers", "fp32", 5), ("edgevlm", "fp32", 9), ("transformers", "fp32", 9),
        ("edgevlm", "int4", 5), ("edgevlm", "int4", 9),
    ]  # fmt: skip
    assert all(list(line) == [*place, "against", "against_kv", *RATIO] for line in ratios)
    assert [(line["runtime"], line["against"], line["context"]) for line in ratios] == [
        ("edgevlm", "transformers", 5), ("edgevlm", "transformers", 9),
    ]  # fmt: skip
    assert all(line["low"] <= line["ratio"] <= line["high"] for line in ratios)
    left_out = "skipping llama.cpp: package no_llama is not installed; run pip install llama-cpp-python"
    assert done.stderr.count(left_out) == 2
    assert "skipping transformers: int4 weights are not supported" in done.stderr
    table = bench("decode", "--model", "demo", "--held", "5", "--precisions", "fp32").stdout.splitlines()
    heads = [row for row in table if row.startswith("runtime")]
    assert [head.split()[:4] for head in heads] == [["runtime", "precision", "kv", "context"]] * 2
    assert [row.split()[:4] for row in table[1:4]] == [
        ["edgevlm", "fp32", "fp32", "5"], ["edgevlm", "fp32", "fp16", "5"], ["transformers", "fp32", "fp32", "5"],
    ]  # fmt: skip
    assert table[5].split()[:6] == ["edgevlm", "fp32", "fp32", "5", "transformers", "fp32"]


def test_prefill(tiny):
    command = ["prefill", "--model", "demo", "--held", "20", "--frames", "1,3", "--tokens-per-frame", "4"]
    done = bench(*command, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["runtime"], line["frames"]) for line in lines] == [
        ("edgevlm", 1), ("transformers", 1), ("edgevlm", 3), ("transformers", 3), ("edgevlm", 1), ("edgevlm", 3),
    ]  # fmt: skip
    place = ["bench", "schema", "runtime", "model", "tokens_per_frame", "threads", "precision", "held", "frames", "kv"]
    assert list(lines[0]) == [*place, "ms_per_frame", *SPREAD, "cpu_ms_per_frame"]
    assert list(lines[-1]) == [*place, "against", "against_kv", *RATIO]
    assert {(line["bench"], line["held"], line["tokens_per_frame"]) for line in lines} == {("prefill", 20, 4)}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["decode", "--model", "demo", "--held", "0"], "--held '0': give integers of 1 or more"),
        (["decode", "--model", "demo", "--kv", "int4"], "--kv int4: choose from fp32, fp16, int8"),
        (["decode", "--model", "demo", "--held", "9000"], "--held 9000: demo supports 1 to 127"),
        (
            ["decode", "--model", "demo", "--against", "vllm"],
            "--against vllm: choose from llama.cpp, openvino, transformers",
        ),
        (["decode", "--model", "demo", "--precisions", "int5"], "unknown --precision 'int5'"),
        (["decode", "--tokens", "9"], "--tokens: is not supported by bench speed decode"),
        (["precision"], "--rounds: is not supported by bench speed precision"),
        (["vision", "--precisions", "int4"], "int4"),
    ],
)
def test_refusals(tiny, command, says):
    with pytest.raises(UserError, match=says):
        bench(*command)
