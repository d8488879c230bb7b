"""``edgevlm bench memory retrieval``: what it prints, and that its ratios are what was counted."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.cli import app

TYPED = ["bench", "memory", "retrieval", "--budget", "256", "--frames", "48", "--questions", "1", "--threads", "1"]
LAYERS, HEADS = 4, 2


def run(*more):
    return CliRunner().invoke(app, [*TYPED, *more], catch_exceptions=False)


def test_a_line_has_every_ratio_and_share():
    done = run("--policy", "resv:threshold=0.2,distance=9,resv:retrieve=question", "--json")
    assert done.exit_code == 0
    always, asked = map(json.loads, done.stdout.splitlines())
    assert (always["policy"], asked["policy"]) == ("resv:threshold=0.2,distance=9", "resv:retrieve=question")
    assert (always["bench"], always["frames"], always["budget"], always["lost"]) == ("retrieval", 48, 256, 0)
    assert always["offloaded_rows"] == 48 * 16 - always["window_rows"]
    for phase in ("prefill", "question", "answer"):
        for way in ("fetched", "attended", "rule"):
            ratios = always["heads"][way][phase]
            assert [len(of_layer) for of_layer in ratios] == [HEADS] * LAYERS
            mean = sum(map(sum, ratios)) / LAYERS / HEADS
            assert always[f"{phase}_{'ratio' if way == 'fetched' else way}"] == pytest.approx(mean, abs=1e-4)
            assert 0 < mean <= 1
        assert sum(always["breakdown"][phase].values()) == pytest.approx(1, abs=1e-3)
        assert min(always["breakdown"][phase].values()) > 0
    assert always["prefill_attended"] > always["prefill_ratio"]
    assert asked["prefill_ratio"] == 0 < asked["question_ratio"]
    assert asked["prefill_rule"] is None
    for line in (always, asked):
        assert line["bytes_per_question"] > 0
        assert min(line["frame_over_window"], line["ttft_over_window"], line["offload_ms_per_frame"]) > 0


def test_a_short_memory_has_questions_read_the_file(monkeypatch):
    forgotten = []
    monkeypatch.setattr("edgevlm.bench.memory.retrieval.forget_pages", forgotten.append)
    more = ("--frames", "64", "--host-bytes", "1000000", "--cold", "--chunk", "1", "--policy", "resv", "--json")
    line = json.loads(run(*more).stdout)
    assert len(forgotten) == 2, "before each question, the one that does not count too"
    assert (line["host_bytes"], line["chunk"], line["cold"], line["frames"]) == (1_000_000, 1, True, 64)
    assert line["disk_bytes_per_question"] > 0
    roomy = json.loads(run("--policy", "resv", "--json").stdout)
    assert roomy["disk_bytes_per_question"] == 0 < roomy["bytes_per_question"]


def test_the_table():
    head, row = run().stdout.splitlines()
    assert head.startswith("policy")
    assert row.split()[:2] == ["resv", "256"]


def test_a_policy_that_retrieves_nothing_is_refused():
    done = CliRunner().invoke(app, [*TYPED, "--policy", "h2o"])
    assert done.exit_code != 0
    assert str(done.exception).startswith("policy h2o retrieves nothing; name one of ")
    assert "resv" in str(done.exception)
