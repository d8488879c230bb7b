"""`edgevlm bench stream`: lines at the marks asked for, full KV that does not fit, processes that are killed."""

import json
from dataclasses import replace

import pytest
from typed import edgevlm

from edgevlm.bench.stream import growth as bench
from edgevlm.bench.stream.growth import GrowthWork, growth, measure
from edgevlm.engines.power import Reading
from edgevlm.runtime.helper_process import Helper, HelperEnded

WORK = GrowthWork("demo", "infinipot-v", 256, 8, (8, 24), questions=2, threads=1)
FIRST = ["bench", "schema", "model", "policy", "chunk", "frames", "threads"]


def test_lines_at_each_mark_of_each_policy_and_chunk():
    done = edgevlm("bench", "stream", "--frames", "8,20,40", "--chunk", "8,16", "--policy", "full", "--policy", "last-seen",
               "--budget", 256, "--questions", 2, "--threads", 1, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "energy: not measured" in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["policy"], line["chunk"], line["frames"]) for line in lines] == [
        (policy, chunk, frames) for policy in ("full", "last-seen") for chunk in (8, 16) for frames in (8, 20, 40)
    ]
    assert all(list(line)[:7] == FIRST for line in lines)
    bounded = [line for line in lines if line["policy"] == "last-seen"]
    for line in lines:
        assert line["peak_rss_mb"] > line["cache_mb"] > 0
        assert line["cold_ms_per_frame"] > 0
        assert line["cold_ttft_ms"] > 0
        if line["frames"] <= line["chunk"]:
            assert line["fps"] is None, "a first chunk alone has nothing warm"
        else:
            assert 0 < line["fps_low"] <= line["fps_high"]
            assert line["fps"] > 0
        assert 0 < line["ttft_ms_p50"] <= line["ttft_ms_p95"] <= line["ttft_ms_p99"]
        assert 0 <= line["compress_fraction"] < 1
        assert not line["oom"]
    assert all(line["budget"] == 256 for line in bounded)
    full = [line["cache_mb"] for line in lines if line["policy"] == "full" and line["chunk"] == 8]
    assert full[0] < full[1] < full[2]
    assert bounded[2]["cache_mb"] < full[2]
    assert bounded[2]["compress_fraction"] > 0


def test_full_kv_that_does_not_fit_is_not_begun():
    lines = list(measure(replace(WORK, policy="full", budget=None, marks=(2, 10_000), questions=1)))
    assert [line["frames"] for line in lines] == [2, 10_000]
    assert "positions" in lines[1]["stopped"]


class Steady:
    """A meter of 5 W."""

    name, why, rails, summed = "steady", "", ("all",), ("all",)

    def read(self):
        return {"all": Reading(watts=5.0)}


def test_energy_is_a_frames_and_a_tokens(monkeypatch):
    monkeypatch.setattr(bench, "find_meter", lambda: (Steady(), []))
    for line in measure(WORK):
        assert line["joules_per_frame"] > 0
        if line["fps"]:  # all but the first chunk
            assert line["joules_per_frame"] == pytest.approx(5 / line["fps"], rel=0.5)
        assert line["joules_per_token"] > 0


def test_a_process_that_the_system_kills_is_out_of_memory(monkeypatch):
    def killed(work):
        raise HelperEnded(-9)

    monkeypatch.setattr(Helper, "lines", lambda helper, function, **work: killed(work))
    lines = list(growth(policy=["full"], frames=[4, 8]))
    assert [(line["frames"], line["oom"]) for line in lines] == [(4, True), (8, True)]
