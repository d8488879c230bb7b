"""The bench of the cut decoder on a tiny shape: it runs, and says what it measured."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from edgevlm.bench import cut, rounds, seeded
from edgevlm.bench.cut import SEEDED, run
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape

SHAPE = DecoderShape(
    layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=48, vocab=40, norm_eps=1e-6, rope_theta=1e4,
    model_limit=512, tied=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(seeded, "llava_onevision_05b", lambda: SHAPE)
    monkeypatch.setattr(cut, "TOKENS_PER_FRAME", 6)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_line_for_each_memory_and_kind_of_step(precision):
    said = []
    lines = list(run([SEEDED], (12, 40), 2, 1, precision, said.append))
    assert [(line["held"], line["rows"]) for line in lines] == [(12, 1), (12, 6), (40, 1), (40, 6)]
    for line in lines:
        assert (line["bench"], line["model"], line["threads"]) == ("cut", SEEDED, 1)
        assert (line["precision"], line["kv"], line["layers"], line["hidden"]) == (precision, "fp32", 2, 32)
        assert line["whole_ms"] > 0 < line["cut_ms"]
        assert line["low"] <= line["ratio"] <= line["high"]
    assert said[-1] == f"{SEEDED}: 40 rows held, 6 new"


def test_the_ratio_is_of_the_rounds(monkeypatch):
    took = iter([9, 9, 10, 11, 30, 60, 8, 8])  # whole and cut in turn, the first round not counted
    monkeypatch.setattr(rounds, "_once", lambda job: rounds.Took(float(next(took)), 1.0))
    line = next(run([SEEDED], (12,), 3, 1, "fp32", lambda what: None))
    assert [line[name] for name in ("whole_ms", "cut_ms", "ratio")] == [10, 11, 1.1]


def test_the_command(monkeypatch):
    monkeypatch.setattr(cut, "HELD", (12,))
    command = ["bench", "cut", "--model", SEEDED, "--model", "demo", "--rounds", "1", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["model"], line["held"], line["rows"]) for line in found] == [
        (SEEDED, 12, 1), (SEEDED, 12, 6), ("demo", 12, 1), ("demo", 12, 16),
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*command, "--held", "20"], catch_exceptions=False)
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["model", "weights", "kv", "held", "rows", "whole", "ms", "cut", "ms", "cut/whole", "low", "high"]
    assert [row.split()[:5] for row in rows[:2]] == [[SEEDED, "fp32", "fp32", "20", str(count)] for count in (1, 6)]


def test_a_memory_that_cannot_be():
    with pytest.raises(UserError, match="GB are free; lower --held"):
        list(run([SEEDED], (10**12,), 1, 1, "fp32", lambda what: None))


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_the_memory_is_noise_of_the_bundles_precision(kv):
    spec = SimpleNamespace(layers=2, kv_heads=2, head_dim=8, kv=kv)
    made = cut.memory(spec, 9)
    assert [buffer.shape for buffer in made] == [(1, 2, 9, 8)] * 2
    for buffer in made:
        key, value = cut.arrays_of(buffer)
        assert len(set(key.reshape(-1).tolist())) > 20
        assert key.dtype == value.dtype == buffer.dtype
        assert (buffer.key_scale is not None) == (kv == "int8")
