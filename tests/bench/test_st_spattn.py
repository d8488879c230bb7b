"""The bench of sparse prefill on a tiny shape: it runs, and says what it measured."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from edgevlm.bench import st_spattn
from edgevlm.bench.st_spattn import prefill_pattern
from edgevlm.cli import app
from edgevlm.errors import UserError

SHAPE = {"tokens_per_frame": 6, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}


def test_a_line_for_each_size_of_the_memory():
    lines = list(prefill_pattern(**SHAPE, held=(12, 40), frames=2, st_spattn_from=1, repeats=1, threads=1))
    assert [line["held"] for line in lines] == [12, 40]
    for line in lines:
        assert line["bench"] == "prefill-pattern"
        assert (line["frames"], line["st_spattn_from"], line["threads"]) == (2, 1, 1)
        assert all(line[key] == value for key, value in SHAPE.items() if key != "intermediate")
        assert line["dense_ms"] > 0 < line["st_spattn_ms"]


def test_the_ratio_is_of_the_pairs(monkeypatch):
    clock = iter([9, 9, 10, 5, 30, 10, 8, 8])  # dense and sparse in turn, the first pair not counted
    monkeypatch.setattr(st_spattn, "timed", lambda work: float(next(clock)))
    (line,) = prefill_pattern(**SHAPE, held=(12,), repeats=3, threads=1)
    assert [line[name] for name in ("dense_ms", "st_spattn_ms", "ratio")] == [10, 8, 2]


@pytest.fixture
def tiny(monkeypatch):
    """The command measures a tiny shape."""
    without_layers = {key: value for key, value in SHAPE.items() if key != "layers"}
    monkeypatch.setattr(st_spattn, "prefill_pattern", partial(prefill_pattern, **without_layers))


def test_the_command(tiny):
    command = ["bench", "prefill-pattern", "--held", "12", "--held", "40", "--layers", "2", "--repeats", "1", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert [json.loads(line)["held"] for line in done.stdout.splitlines()] == [12, 40]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    shape, head, *rows = done.stdout.splitlines()
    assert shape == "2 layers, sparse from layer 1; 1 x 6 rows"
    assert head.split() == ["held", "dense", "ms", "ST-SpAttn", "ms", "dense/sparse"]
    assert [row.split()[0] for row in rows] == ["12", "40"]


@pytest.mark.parametrize(
    ("held", "says"), [(6, "is no more than a frame; give 7 or more"), (10**12, "GB are free; lower --held")]
)
def test_a_memory_that_cannot_be(held, says):
    with pytest.raises(UserError, match=says):
        list(prefill_pattern(**SHAPE, held=(12, held), threads=1))
