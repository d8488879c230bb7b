"""The bench of ``edgevlm serve``: what it measures, on real servers."""

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from edgevlm.cli import app

pytest.importorskip("fastapi")


def lines(*arguments):
    command = ["bench", "serve", *arguments, "--rounds", "1", "--json"]
    return [json.loads(line) for line in CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()]


def test_answers_through_http_and_in_process():
    (line,) = lines("ttft", "--threads", "1")
    assert (line["bench"], line["questions"]) == ("serve-ttft", 1)
    assert line["low"] <= line["ratio"] <= line["high"]
    assert min(line["ttft_ms"], line["http_ttft_ms"]) > 0


def test_a_model_of_random_weights_answers_too(monkeypatch):
    seeded = pytest.importorskip("edgevlm.bench.seeded")
    monkeypatch.setitem(seeded.SHAPES, "seeded-0.5b", seeded.SHAPES["demo"])
    (line,) = lines("ttft", "--model", "seeded-0.5b", "--threads", "1")
    assert (line["model"], line["questions"]) == ("seeded-0.5b", 1)


def test_cameras_on_one_model_and_in_processes_of_their_own():
    found = lines("cameras", "--cameras", "1,2", "--seconds", "0.5", "--threads", "1")
    assert [(line["bench"], line["cameras"], line["processes"]) for line in found] == [
        ("serve-cameras", count, processes) for count, processes in ((1, 1), (2, 1), (2, 2))
    ]
    assert all(line["fps"] > 0 for line in found)
    _, together, apart = found
    assert apart["against"] == "one process"
    assert apart["rss_bytes"] > together["rss_bytes"]  # runtime and weights are there once
    assert together["planned_bytes"] > 0
    assert together["error"] == pytest.approx(together["planned_bytes"] / together["camera_bytes"] - 1, abs=1e-3)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_clients_beside_a_camera(monkeypatch):
    monkeypatch.setattr("edgevlm.bench.serve.RATES", (5,))
    monkeypatch.setattr("edgevlm.bench.serve.LISTENERS", 3)
    cores = os.sched_getaffinity(0)
    found = lines("clients", "--seconds", "0.5")
    assert [(line["requests"], line.get("rate"), line.get("clients")) for line in found] == [
        ("events", None, 3), ("metrics", 5, None), ("frame.jpg", 5, None)
    ]  # fmt: skip
    assert all(min(line["fps_ratio"], line["cpu_fps_ratio"]) > 0 for line in found)
    assert all(line["reached"] >= 0 for line in found[1:])
    assert os.sched_getaffinity(0) == cores


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("chromium-browser")), reason="there is no chromium")
def test_the_page_that_stays_open():
    command = ["bench", "serve", "page", "--hours", "0.02", "--json"]
    found = [json.loads(line) for line in CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()]
    *samples, growth = found
    assert {line["bench"] for line in samples} == {"serve-page"}
    assert all(
        min(line["heap_bytes"], line["nodes"], line["listeners"], line["rss_bytes"], line["browser_bytes"]) > 0
        for line in samples
    )
    assert growth["bench"] == "serve-page-growth"
    assert samples[-1]["hours"] >= 0.02
    assert growth["hours"] > 0
