"""``edgevlm bench vrex``: the analytic model beside numbers worked out by hand, its constants, and measured ratios."""

import pytest
from typer.testing import CliRunner

from edgevlm.bench.vrex import Analytic, calibrated, load_paper, vrex
from edgevlm.cli import app

METHODS = {  # prefill, generation, scattered, prediction, rows a summary, predicts frames
    "tokens": (0.5, 0.1, True, "top_k", 2, True),
    "frames": (0.5, 0.1, False, "top_k", 2, True),
    "clusters": (0.5, 0.1, True, "resv", 2, True),
    "answers": (1.0, 0.1, True, "top_k", 2, False),
    "all": (1.0, 1.0, False, None, None, False),
}
NAMES = ("prefill_ratio", "generation_ratio", "is_scattered", "prediction", "rows_a_summary", "predicts_frames")


def small(link=1e-8, **switches):
    """1,000 operations and 1,000 bytes of DRAM a second, 10 bytes over PCIe; a system for each method on a GPU and on V-Rex."""
    hardware = {"tflops": 1e-9, "dram_gb_s": 1e-6, "link_gb_s": link, "watts": 10}
    systems = {
        f"{method}/{place}": {"hardware": place, "method": method, **switches}
        for method in METHODS
        for place in ("gpu", "vrex")
    }
    paper = {
        "llm": {"layers": 2, "hidden": 4, "intermediate": 8, "heads": 2, "kv_heads": 1, "head_dim": 2, "vocab": 10, "bytes": 2},
        "tower": {"layers": 1, "width": 4, "intermediate": 8, "patches": 6, "frame_rows": 3},
        "workload": {"frames": 26, "question": 5, "answer": 39},
        "hardware": {"gpu": {**hardware, "is_gpu": True}, "vrex": {**hardware, "is_gpu": False}},
        "methods": {name: {"title": name, **dict(zip(NAMES, values, strict=True))} for name, values in METHODS.items()},
        "systems": systems,
    }
    return Analytic(paper, utilisation=0.5, scattered=0.5, top_k=7.0, resv=11.0)


def test_work():
    model = small()
    operations, size = model.decoder_work(3, 5, 2)
    assert operations == 2 * (2 * 288 * 3 + 4 * 2 * 2 * 2 * 3 * 6.5 + 2 * 40) == 4864
    assert size == 2 * 328 + 2 * 16 * 8 == 912
    assert model.tower_work(2) == (2 * (2 * 128 * 6 + 4 * 36 * 4 + 2 * 32 * 3), 2 * 160)
    paper = Analytic(load_paper())
    assert paper.row_bytes == 131_072
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert paper.decoder_work(1, 0, 1)[1] == 2 * weights + 131_072


@pytest.mark.parametrize(
    ("method", "fetch", "prediction"),
    [("tokens", 32, 0.21), ("frames", 16, 0.21), ("clusters", 32, 0.33), ("answers", 32, 0), ("all", 32, 0)],
)
def test_a_frame_on_a_gpu(method, fetch, prediction):
    """Two streams of ten rows. Half of 16-byte rows: 160 bytes at 10 a second, at half of that where they lie apart."""
    assert small().call(f"{method}/gpu", 3, 10, 2).seconds == pytest.approx(9.216 + prediction + fetch)
    held = small(offloads=False).call(f"{method}/gpu", 3, 10, 2)
    assert (held.fetch, held.seconds) == (0, pytest.approx(9.216 + prediction + held.decoder))


def test_constants_give_the_figures_that_they_are_taken_from():
    fixing = [line for line in vrex() if line.get("fixes")]
    assert len(fixing) == 4
    assert all(line["error"] == 0 for line in fixing)
    model = calibrated(load_paper())
    weights = 2 * (6_979_321_856 + 128256 * 4096)
    assert model.utilisation == pytest.approx((weights + 131072 * 26) / 204.8e9 / 0.089)


def run(*arguments):
    done = CliRunner().invoke(app, ["bench", "vrex", *map(str, arguments)], catch_exceptions=False)
    return done.stdout


def test_the_command():
    (row,) = [row for row in run().splitlines() if row.startswith("Fig. 13a") and "40,000" in row and "frame_ms" in row]
    assert row.split()[2:] == ["frame_ms", "V-Rex8", "-", "40,000", "1", "437", "254", "0.722", "-"]
