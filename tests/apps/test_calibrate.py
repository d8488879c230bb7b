"""``edgevlm calibrate`` as it is typed: it measures layers, compares policies, and a run then uses what was found."""

import json
import shutil
import subprocess
import time

import checkpoints
import pytest
from clips import clip
from typed import edgevlm, events, of_kind, refused, start

from edgevlm.calib.accuracy.select_policy import TAUS
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import Calibration
from edgevlm.runtime.model import is_demo

DEMO = ("calibrate", "demo", "--frames", "16", "--budget", "64", "--threads", "1")
FIELDS = {
    "event", "schema", "policy", "budget", "measure", "value", "ci_low", "ci_high", "compress_ms", "bytes", "tokens", "top1",
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    checkpoints.make_checkpoint(folder / "checkpoint", "llava", max_positions=1024)
    return export_checkpoint(folder / "checkpoint", folder / "bundle")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "demo"


def test_the_demo_is_measured_and_compared_and_a_run_uses_it(out):
    layers, *found = events(*DEMO, "--policies", "sliding-window,uniform", "--out", out, "--json")
    assert (layers["event"], layers["bundle"], layers["frames"]) == ("calibration", str(out), [16] * 4)
    fields = {name: value for name, value in layers.items() if name not in ("event", "schema", "bundle")}
    assert Calibration.from_json(json.dumps({"format": 1, **fields}).encode()) == Bundle.load(out).calibration()
    candidates, (choice,) = of_kind(found, "candidate"), of_kind(found, "choice")
    assert [(set(line), line["policy"]) for line in candidates] == [(FIELDS, "sliding-window"), (FIELDS, "uniform")]
    assert all(0 <= line["ci_low"] <= line["value"] <= line["ci_high"] for line in candidates)
    kept = Bundle.load(out).choices()
    assert (kept.measure, kept.frames, len(kept.watched), kept.append.tau in (None, *TAUS)) == ("kl", 16, 4, True)
    run = ("run", "--model", out, "--frames", 12, "--budget", 64)
    assert events(*run, "--json")[-1]["policy"] == choice["policy"], "auto"
    assert edgevlm(*run, "--policy", "infinipot-v").stderr.split("infinipot-v: ")[1].startswith("calibrated ")
    done = edgevlm(*run, "--policy", "infinipot-v:tau=preset", "--ask", "is it raining?")
    assert "infinipot-v: default thresholds, as set\n" in done.stderr
    assert "never taught" in done.stdout, "a copy of the demo model is the demo model"
    assert is_demo(Bundle.load(out, verify="size"))
    assert list(out.parent.iterdir()) == [out], "nothing else is left"


def test_a_real_clip_into_the_bundle_itself(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    options = ("--video", clip("bikes.mp4"), "--frames", 20, "--threads", 1, "--ask", "what color was the bike?")
    page = edgevlm("calibrate", copy, *options, "--policies", "sliding-window,h2o", "--budget", "25%,64").stdout
    measured, kept = Bundle.load(copy).calibration(), Bundle.load(copy).choices()
    assert (measured.clips, measured.frames) == (("bikes.mp4",), (20,))
    assert f"infinipot-v  tau {'/'.join(f'{threshold:.4f}' for threshold in measured.thresholds)}" in page
    assert page.splitlines()[-1] == f"calibrated {measured.described}: {copy}"
    assert page.count("\nauto: ") == 2
    found = {choice.budget: [candidate.policy for candidate in choice.candidates] for choice in kept.budgets}
    assert set(found) == {64, 80}, "25 % of 20 frames of 16 tokens are 80"
    assert all(set(policies) == {"sliding-window", "h2o"} for policies in found.values())
    assert all(0 <= each.top1 <= 1 and each.bytes > 0 for choice in kept.budgets for each in choice.candidates)


def test_a_kill_keeps_what_was_measured(out):
    """A real process, killed between two sessions; the next one goes on from its records and its layers."""
    arguments = [*DEMO, "--policies", "uniform,random", "--out", str(out), "--json"]
    process = start(*arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (found := list(out.parent.glob(".demo.calibrating-*/kl-16.jsonl"))) or len(_records(found[0])) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not out.exists()
    layers = Calibration.from_json((found[0].parent / "layers.json").read_bytes())
    records = _records(found[0])
    first = json.loads(records[1])
    records[1] = json.dumps(first | {"compress_ms": 1e9})  # a mark that a repeated session would not bear
    found[0].write_text("\n".join(records) + "\n")
    event, *found = events(*arguments)
    marked = [line for line in of_kind(found, "candidate") if line["compress_ms"] > 1e6]
    assert len(marked) == (first["policy"] != "full")
    assert event["date"] == layers.date, "the layers were not measured again"
    assert list(out.parent.iterdir()) == [out]


def _records(journal):
    """Whole lines of a journal."""
    return journal.read_text().split("\n")[:-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["BUNDLE"], "calibration requires clips"),
        (["BUNDLE", "--video", "nothing.mp4"], "nothing.mp4: file not found"),
        (["nowhere", "--video", __file__], "no such bundle folder"),
        (["BUNDLE", "--video", __file__], "not a readable video"),
        (["demo", "--frames", "3"], "3 frames are too few"),
        (["demo", "--frames", "100000"], "set fewer"),
        (["x" * 300], "File name too long"),
        (["demo", "--out", "BUNDLE"], "bundle already exists"),
        (["demo", "--out", "OUT", "--policies", "unifrom"], "did you mean 'uniform'"),
        (
            ["demo", "--out", "OUT", "--policies", "oracle"],
            "--policies oracle: must be all, none or policies that have a budget",
        ),
        (["demo", "--out", "OUT", "--frames", "16", "--budget", "256"], "--budget 256: must be below a clip's 256 tokens"),
        (["demo", "--out", "OUT", "--frames", "16", "--budget", "8"], "no policy can run"),
    ],
)
def test_what_is_refused_is_one_line_and_changes_nothing(bundle, out, arguments, says):
    before, places = (bundle / "bundle.json").read_bytes(), {"BUNDLE": bundle, "OUT": out}
    assert says in refused("calibrate", *(places.get(part, part) for part in arguments))
    assert (bundle / "bundle.json").read_bytes() == before
    assert not out.exists()
