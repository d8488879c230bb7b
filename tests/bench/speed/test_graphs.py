"""Per-layer graphs and ST-SpAttn beside the full graph, on a tiny shape."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench import models, seeded, timing
from edgevlm.bench.noise import noise_buffers
from edgevlm.bench.speed.graphs import SEEDED, per_layer, st_spattn
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.runtime.engine import arrays_of

SHAPE = DecoderShape(
    layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=48, vocab=40, norm_eps=1e-6, rope_theta=1e4,
    model_limit=512, tied=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(seeded.SHAPES, SEEDED, ("qwen2", SHAPE))
    monkeypatch.setattr(models, "TOKENS_PER_FRAME", 6)


def took_in_turn(monkeypatch, *times):
    clock = iter(times)
    monkeypatch.setattr(timing, "time_job", lambda job: timing.Took(float(next(clock)), 1.0))


def test_a_line_for_each_memory_precision_and_kind_of_step():
    said = []
    lines = list(per_layer([SEEDED], (12, 40), ("fp32", "int4"), 1, 2, progress=said.append))
    steps = [(12, 1), (12, 6), (40, 1), (40, 6)]
    assert [(line["precision"], line["held"], line["rows"]) for line in lines] == [
        (precision, *step) for precision in ("fp32", "int4") for step in steps
    ]
    for line in lines:
        assert (line["bench"], line["model"], line["threads"]) == ("per-layer", SEEDED, 1)
        assert (line["kv"], line["layers"], line["hidden"]) == ("fp32", 2, 32)
        assert line["full_ms"] > 0 < line["per_layer_ms"]
        assert line["low"] <= line["ratio"] <= line["high"]
    assert said[-1] == f"{SEEDED}: 40 rows held, 6 new"


def test_ratios_are_of_the_rounds(monkeypatch):
    took_in_turn(monkeypatch, 9, 9, 10, 11, 30, 60, 8, 8)  # full and per-layer in turn, the first round not counted
    line = next(per_layer([SEEDED], (12,), threads=1, rounds=3))
    assert [line[name] for name in ("full_ms", "per_layer_ms", "ratio")] == [10, 11, 1.1]
    took_in_turn(monkeypatch, 9, 9, 10, 5, 30, 10, 8, 8)  # dense and sparse
    (line,) = st_spattn((12,), threads=1, rounds=3, shape=SHAPE, tokens_per_frame=6)
    assert [line[name] for name in ("dense_ms", "st_spattn_ms", "ratio")] == [10, 8, 2]


def test_per_layer_command():
    command = ["bench", "speed", "per-layer", "--model", "demo", "--held", "12", "--rounds", "1", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["model"], line["held"], line["rows"]) for line in found] == [("demo", 12, 1), ("demo", 12, 16)]
    head, *rows = CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()
    assert head.split()[:5] == ["model", "precision", "kv", "held", "rows"]
    assert [row.split()[:5] for row in rows] == [["demo", "fp32", "fp32", "12", count] for count in ("1", "16")]


def test_st_spattn_has_a_line_for_each_size_of_the_memory():
    lines = list(st_spattn((12, 40), (2,), threads=1, rounds=1, shape=SHAPE, tokens_per_frame=6))
    assert [line["held"] for line in lines] == [12, 40]
    for line in lines:
        assert (line["bench"], line["frames"], line["st_spattn_from"], line["layers"]) == ("prefill-pattern", 2, 1, 2)
        assert line["dense_ms"] > 0 < line["st_spattn_ms"]


def test_a_memory_that_cannot_be():
    with pytest.raises(UserError, match="GB are free; lower --held"):
        list(per_layer([SEEDED], (10**12,), threads=1, rounds=1))
    with pytest.raises(UserError, match="is no more than a frame; give 7 or more"):
        list(st_spattn((12, 6), threads=1, shape=SHAPE, tokens_per_frame=6))


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_the_memory_is_noise_of_a_precision(kv):
    made = noise_buffers(2, 2, 9, 8, kv)
    assert [buffer.shape for buffer in made] == [(1, 2, 9, 8)] * 2
    for buffer in made:
        key, value = arrays_of(buffer)
        assert len(np.unique(key)) > 20
        assert key.dtype == value.dtype == buffer.dtype
        assert (buffer.key_scale is not None) == (kv == "int8")
