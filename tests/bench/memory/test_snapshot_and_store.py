"""``edgevlm bench memory snapshot`` and ``store``: they measure all that they name, and leave nothing."""

import json

from typer.testing import CliRunner

from edgevlm.bench.memory.store import store
from edgevlm.cli import app


def test_a_snapshot_of_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    typed = ["bench", "memory", "snapshot", "--policy", "h2o", "--budget", "256", "--rounds", "2", "--threads", "1"]
    done = CliRunner().invoke(app, [*typed, "--json"], catch_exceptions=False)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert (line["bench"], line["model"], line["policy"], line["budget"]) == ("snapshot", "demo", "h2o", 256)
    for part in ("frame", "hold", "write"):
        assert 0 < line[f"{part}_low"] <= line[f"{part}_ms"] <= line[f"{part}_high"]
    assert min(line["cold_hold_ms"], line["bytes"], line["hold_over_frame"]) > 0
    assert not list(tmp_path.iterdir())


def test_a_store(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (line,) = store(2, 600, 40)
    assert list(tmp_path.iterdir()) == []
    assert all(line[name] > 0 for name in line if name != "bench")
    assert line["bytes"] == 32 * 2 * (4 * 64 + 24)
