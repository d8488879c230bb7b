"""``edgevlm calibrate`` as it is typed: what it prints, what it refuses, and that a run then says so."""

import json
import shutil

import checkpoints
import pytest
from clips import clip
from typed import edgevlm

from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import Calibration
from edgevlm.runtime.model import is_demo


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    checkpoints.make_checkpoint(folder / "checkpoint", "llava", max_positions=1024)
    return export_checkpoint(folder / "checkpoint", folder / "bundle")


def test_the_demo_is_measured_on_its_own_world(tmp_path):
    out = tmp_path / "demo"
    done = edgevlm("calibrate", "demo", "--frames", 20, "--out", out, "--policies", "none", "--json")
    assert done.returncode == 0, done.stderr
    event = json.loads(done.stdout)
    assert (event["event"], event["bundle"], event["frames"]) == ("calibration", str(out), [20] * 4)
    measured = Bundle.load(out).calibration()
    fields = {name: value for name, value in event.items() if name not in ("event", "schema", "bundle")}
    assert Calibration.from_json(json.dumps({"format": 1, **fields}).encode()) == measured
    done = edgevlm("run", "--model", out, "--frames", 8, "--budget", 64, "--policy", "infinipot-v")
    assert done.stderr.split("infinipot-v: ")[1].startswith("calibrated ")
    nonsense = ("--ask", "is it raining?")
    done = edgevlm("run", "--model", out, "--frames", 8, "--budget", 64, "--policy", "infinipot-v:tau=preset", *nonsense)
    assert "infinipot-v: default thresholds, as set\n" in done.stderr
    assert "never taught" in done.stdout, "a copy of the demo model is the demo model"
    assert is_demo(Bundle.load(out, verify="size"))


def test_a_real_clip_into_the_bundle_itself(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    done = edgevlm("calibrate", copy, "--video", clip("bikes.mp4"), "--frames", 12, "--policies", "none")
    assert done.returncode == 0, done.stderr
    measured = Bundle.load(copy).calibration()
    assert (measured.clips, measured.frames) == (("bikes.mp4",), (12,))
    tau = "/".join(f"{threshold:.4f}" for threshold in measured.thresholds)
    assert f"infinipot-v  tau {tau}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"calibrated {measured.described}: {copy}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["BUNDLE"], "say on which clips"),
        (["BUNDLE", "--video", "nothing.mp4"], "nothing.mp4: there is no such file"),
        (["nowhere", "--video", __file__], "no such bundle folder"),
        (["BUNDLE", "--video", __file__], "not a video that can be read"),
        (["demo", "--frames", "3"], "3 frames are too few"),
        (["demo", "--frames", "100000"], "give fewer"),
        (["demo", "--threads", "257"], "256"),
        (["x" * 300], "File name too long"),
        (["demo", "--out", "BUNDLE"], "a bundle is there already"),
    ],
)
def test_what_is_refused_is_one_line_and_changes_nothing(bundle, arguments, says):
    before = (bundle / "bundle.json").read_bytes()
    done = edgevlm("calibrate", *(bundle if part == "BUNDLE" else part for part in arguments))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("edgevlm: ")
    assert says in done.stderr
    assert (bundle / "bundle.json").read_bytes() == before
