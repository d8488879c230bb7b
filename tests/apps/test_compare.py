"""``edgevlm calibrate`` compares policies and ``--policy auto`` runs the one chosen, as they are typed."""

import json
import subprocess
import sys
import time

import checkpoints
import cv2
import numpy as np
import pytest
from typed import edgevlm

from edgevlm.calib.accuracy.select_policy import TAUS
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import Calibration

COMMAND = [sys.executable, "-m", "edgevlm"]
FIELDS = {
    "event",
    "schema",
    "policy",
    "budget",
    "measure",
    "value",
    "ci_low",
    "ci_high",
    "compress_ms",
    "bytes",
    "tokens",
    "top1",
}
DEMO = ("calibrate", "demo", "--frames", "16", "--budget", "64", "--threads", "1")


def lines(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    checkpoints.make_checkpoint(folder / "checkpoint", "llava", max_positions=1024)
    return export_checkpoint(folder / "checkpoint", folder / "bundle")


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """15 seconds of a square that moves and changes its colour."""
    path = tmp_path_factory.mktemp("clip") / "square.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 4.0, (64, 64))
    for index in range(60):
        frame = np.full((64, 64, 3), 40, np.uint8)
        frame[index % 40 :][:20, 10:30] = (4 * index, 255 - 4 * index, 128)
        writer.write(frame)
    writer.release()
    return path


@pytest.fixture
def demo_bundle(tmp_path):
    return tmp_path / "demo"


def test_the_demo_is_compared_and_auto_runs_the_choice(demo_bundle):
    layers, *found = lines(edgevlm(*DEMO, "--policies", "sliding-window,uniform", "--out", demo_bundle, "--json"))
    assert layers["event"] == "calibration"
    policies = [line for line in found if line["event"] == "candidate"]
    (choice,) = (line for line in found if line["event"] == "choice")
    assert [(set(line), line["policy"]) for line in policies] == [(FIELDS, "sliding-window"), (FIELDS, "uniform")]
    assert all(0 <= line["ci_low"] <= line["value"] <= line["ci_high"] for line in policies)
    kept = Bundle.load(demo_bundle).choices()
    assert (kept.measure, kept.frames, len(kept.watched), kept.append.tau in (None, *TAUS)) == ("kl", 16, 4, True)
    done = edgevlm("run", "--model", demo_bundle, "--policy", "auto", "--budget", 64, "--frames", 12, "--json")
    *_, summary = lines(done)
    assert summary["policy"] == choice["policy"]
    assert done.stderr.startswith("auto: ")
    assert list(demo_bundle.parent.iterdir()) == [demo_bundle], "nothing else is left"


def test_any_checkpoint_is_compared_by_agreement_with_full_kv(bundle, video, tmp_path):
    out = tmp_path / "out"
    options = ("--video", video, "--policies", "sliding-window,h2o", "--budget", "25%,64", "--frames", 24, "--threads", 1)
    ask = ("--ask", "what color was the square?")
    _, *found = lines(edgevlm("calibrate", bundle, *options, *ask, "--out", out, "--json"))
    policies = [line for line in found if line["event"] == "candidate"]
    assert [(line["policy"], line["budget"]) for line in policies] == [
        (name, budget) for budget in (64, 96) for name in ("sliding-window", "h2o")
    ], "25 % of 24 frames of 16 tokens are 96"
    for line in policies:
        assert set(line) == FIELDS
        assert line["measure"] == "kl"
        assert line["value"] > 0
        assert 0 <= line["top1"] <= 1
        assert line["bytes"] > 0
    kept = Bundle.load(out).choices()
    assert (kept.measure, kept.watched, [choice.budget for choice in kept.budgets]) == ("kl", ("square.avi",), [64, 96])
    page = edgevlm("calibrate", bundle, *options, "--out", tmp_path / "other").stdout
    assert "budget 64" in page
    assert page.count("\nauto: ") == 2


def test_a_kill_keeps_what_was_measured(demo_bundle):
    """A real process, killed between two sessions; the next one goes on from its records and its layers."""
    arguments = [*DEMO, "--policies", "uniform,random", "--out", demo_bundle, "--json"]
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (found := list(demo_bundle.parent.glob(".demo.calibrating-*/kl-16.jsonl"))) or len(_records(found[0])) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not demo_bundle.exists()
    layers = Calibration.from_json((found[0].parent / "layers.json").read_bytes())
    records = _records(found[0])
    first = json.loads(records[1])
    records[1] = json.dumps(first | {"compress_ms": 1e9})  # a mark that a session sat anew would not bear
    found[0].write_text("\n".join(records) + "\n")
    event, *found = lines(edgevlm(*arguments))
    marked = [line for line in found if line["event"] == "candidate" and line["compress_ms"] > 1e6]
    assert len(marked) == (first["policy"] != "full")
    assert event["date"] == layers.date, "the layers were not measured again"
    assert list(demo_bundle.parent.iterdir()) == [demo_bundle]


def _records(journal):
    """Whole lines of a journal."""
    return journal.read_text().split("\n")[:-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policies", "unifrom"], "did you mean 'uniform'"),
        (["--policies", "oracle"], "--policies oracle: name policies that have a budget"),
        (["--budget", "many"], "budget 'many': give a number of tokens"),
        (["--frames", "16", "--budget", "256"], "--budget 256: must lie within a clip's 256 tokens"),
        (["--frames", "16", "--budget", "8"], "none of the policies can run at it"),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(arguments, says, tmp_path):
    done = edgevlm("calibrate", "demo", "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr
    assert not (tmp_path / "out").exists()
