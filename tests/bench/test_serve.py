"""The bench of ``edgevlm serve``: what it measures, on real servers."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.cli import app

pytest.importorskip("fastapi")


def lines(*arguments):
    command = ["bench", "serve", *arguments, "--rounds", "1", "--json"]
    return [json.loads(line) for line in CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()]


def test_cameras_on_one_model_and_in_processes_of_their_own():
    found = lines("--cameras", "1,2", "--seconds", "0.5", "--threads", "1")
    assert [(line["bench"], line["cameras"], line["processes"]) for line in found] == [
        ("serve-cameras", count, processes) for count, processes in ((1, 1), (2, 1), (2, 2))
    ]
    assert all(line["fps"] > 0 for line in found)
    _, together, apart = found
    assert apart["against"] == "one process"
    assert apart["rss_bytes"] > together["rss_bytes"]  # runtime and weights are there once
    assert together["planned_bytes"] > 0
    assert together["error"] == pytest.approx(together["planned_bytes"] / together["camera_bytes"] - 1, abs=1e-3)


def test_long_questions_and_the_frames_beside_them():
    found = lines("questions", "--budget", "256", "--fps", "20", "--threads", "1")
    assert [line["bench"] for line in found] == ["serve-questions"] * 3
    assert all(line["ttft_ms"] > 0 and line["frame_ms"] > 0 for line in found[:2])
    assert found[0]["prompt_tokens"] < found[1]["prompt_tokens"] < found[2]["prompt_tokens"]
    assert "shorten it" in found[2]["stopped"], "the demo has 2,368 positions"
