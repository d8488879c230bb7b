"""``edgevlm bench vrex``: the analytic model beside numbers worked out by hand, its constants, and measured ratios."""

import pytest
from typer.testing import CliRunner

from edgevlm.bench.vrex import Analytic, calibrated, load_paper, vrex
from edgevlm.cli import app


def test_work():
    """By hand: two layers of width 4, MLP of 8, two query heads and a KV head of width 2, ten words, two bytes a number."""
    llm = {"layers": 2, "hidden": 4, "intermediate": 8, "heads": 2, "kv_heads": 1, "head_dim": 2, "vocab": 10, "bytes": 2}
    tower = {"layers": 1, "width": 4, "intermediate": 8, "patches": 6, "frame_rows": 3}
    model = Analytic({"llm": llm, "tower": tower})
    operations, size = model.decoder_work(3, 5, 2)
    assert operations == 2 * (2 * 288 * 3 + 4 * 2 * 2 * 2 * 3 * 6.5 + 2 * 40) == 4864
    assert size == 2 * 328 + 2 * 16 * 8 == 912
    assert model.tower_work(2) == (2 * (2 * 128 * 6 + 4 * 36 * 4 + 2 * 32 * 3), 2 * 160)
    paper = Analytic(load_paper())
    assert paper.row_bytes == 131_072
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert paper.decoder_work(1, 0, 1)[1] == 2 * weights + 131_072


@pytest.mark.parametrize("system", ["AGX+FlexGen", "AGX+ReKV", "V-Rex8 KVPU", "V-Rex8"])
def test_a_call_is_its_parts(system):
    model = calibrated(load_paper())
    hardware, method = model.parts(system)
    call = model.call(system, model.frame_rows, 40_000)
    rows = 131_072 * 40_000 * method["prefill_ratio"] / (1e9 * hardware["link_gb_s"])
    assert call.fetch in (pytest.approx(rows), pytest.approx(rows / model.scattered))
    assert call.seconds == call.tower + call.prediction + max(call.decoder, call.fetch)
    assert (call.prediction > 0) == (hardware["is_gpu"] and method["predicts_frames"])


def test_constants_give_the_figures_that_they_are_taken_from():
    fixing = [line for line in vrex() if line.get("fixes")]
    assert len(fixing) == 4
    assert all(line["error"] == 0 for line in fixing)
    model = calibrated(load_paper())
    weights = 2 * (6_979_321_856 + 128256 * 4096)
    assert model.utilisation == pytest.approx((weights + 131072 * 26) / 204.8e9 / 0.089)


def test_the_command():
    done = CliRunner().invoke(app, ["bench", "vrex"], catch_exceptions=False)
    (row,) = [row for row in done.stdout.splitlines() if row.startswith("Fig. 13a") and "40,000" in row and "frame_ms" in row]
    assert row.split()[2:] == ["frame_ms", "V-Rex8", "-", "40,000", "1", "437", "254", "0.722", "-"]
