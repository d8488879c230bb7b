"""``edgevlm bench memory snapshot``: what a snapshot holds the stream for, beside a frame."""

import json

from typer.testing import CliRunner

from edgevlm.cli import app


def test_it_measures_the_demo_and_leaves_nothing(tmp_path):
    typed = ["bench", "memory", "snapshot", "--policy", "h2o", "--budget", "256", "--rounds", "2", "--threads", "1"]
    done = CliRunner().invoke(app, [*typed, "--directory", str(tmp_path), "--json"], catch_exceptions=False)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert (line["bench"], line["model"], line["policy"], line["budget"]) == ("snapshot", "demo", "h2o", 256)
    assert abs(line["hold_over_frame"] - line["hold_ms"] / line["frame_ms"]) < 1e-2 * line["hold_over_frame"] + 1e-3
    for part in ("frame", "hold", "write"):
        assert 0 < line[f"{part}_low"] <= line[f"{part}_ms"] <= line[f"{part}_high"]
    assert min(line["cold_hold_ms"], line["bytes"]) > 0
    assert not list(tmp_path.iterdir())
