"""The bench of ``edgevlm serve``: what it measures, on real servers."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.cli import app

pytest.importorskip("fastapi")


def test_answers_through_http_and_cameras_on_one_model():
    command = ["bench", "serve", "--cameras", "2", "--rounds", "1", "--seconds", "0.1", "--threads", "1", "--json"]
    first, *cameras = [
        json.loads(line) for line in CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()
    ]
    assert (first["bench"], first["questions"]) == ("serve-ttft", 4)
    assert first["low"] <= first["ratio"] <= first["high"]
    assert min(first["ttft_ms"], first["http_ttft_ms"]) > 0
    assert {line["bench"] for line in cameras} == {"serve-cameras"}
    assert [(line["cameras"], line["processes"]) for line in cameras] == [(1, 1), (2, 1), (2, 2)]
    assert all(line["fps"] > 0 for line in cameras)
    _, together, apart = cameras
    assert apart["against"] == "one process"
    assert apart["rss_bytes"] > together["rss_bytes"]  # runtime and weights are there once
    assert all(line["pss_bytes"] <= line["rss_bytes"] for line in cameras)
