"""A checkpoint directory exported by the command and run on real clips."""

import json

import checkpoints
import cv2
import numpy as np
import pytest
from clips import clip
from more_checkpoints import make_more
from typed import edgevlm


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    checkpoints.make_checkpoint(folder / "checkpoint", "llava_onevision", max_positions=4096)
    done = edgevlm("export", folder / "checkpoint", "--out", folder / "bundle")
    assert (done.returncode, done.stdout) == (0, f"{folder / 'bundle'}\n"), done.stderr
    return folder / "bundle"


@pytest.mark.parametrize("name", ["bikes.mp4", "vtest.avi"])
def test_a_real_clip(bundle, name):
    question = "how many are there now?"
    asked = ("--ask", question, "--ask-at", f"5:{question}")
    done = edgevlm("run", "--video", clip(name), "--model", bundle, "--budget", "32", *asked, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("auto: infinipot-v, as the policies were not compared on this model (edgevlm calibrate ")
    assert done.stderr.endswith(
        "; infinipot-v: default thresholds, as the model's layers were not measured (edgevlm calibrate)\n"
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    answers = [line for line in lines if line["event"] == "answer"]
    assert len(answers) == 2
    assert 4.4 < answers[0]["time_s"] <= 5
    assert all(answer["token_ids"] for answer in answers)
    summary = lines[-1]
    assert summary["frames"] == {"bikes.mp4": 20, "vtest.avi": 159}[name]
    assert summary["compressions"] > 3
    assert summary["cache_tokens"] <= 32


def test_a_precision_of_whole_numbers_runs_and_an_unknown_one_is_one_line(bundle):
    checkpoint, out = bundle.parent / "checkpoint", bundle.parent / "int4"
    done = edgevlm("export", checkpoint, "--out", out, "--precision", "int4", "--rounding", "gptq")
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert sorted(path.name for path in out.parent.glob(".*")) == []
    decoder = json.loads((out / "bundle.json").read_text())["decoder"]
    assert (decoder["precision"], decoder["rounding"]) == ("int4", "gptq")
    done = edgevlm("run", "--model", out, "--frames", "12", "--ask", "how many are there now?", "--json")
    assert done.returncode == 0, done.stderr
    assert any(json.loads(line)["event"] == "answer" for line in done.stdout.splitlines())
    for options, says in (
        (["--precision", "int44"], "--precision 'int44' is not known; did you mean 'int4'?"),
        (
            ["--rounding", "gptq"],
            "--rounding gptq is for integers, not fp32; give --precision int4, int4-zp or int8 too",
        ),
    ):
        done = edgevlm("export", checkpoint, "--out", bundle.parent / "other", *options)
        assert (done.returncode, done.stderr) == (2, f"edgevlm: {says}\n")
        assert not (bundle.parent / "other").exists()


def write_video(path, width, height):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 4.0, (width, height))
    random = np.random.default_rng(0)
    for _ in range(24):
        writer.write(np.kron(random.integers(0, 256, (height // 8, width // 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8)))
    writer.release()
    return path


def test_one_bundle_watches_frames_of_any_shape(tmp_path):
    """4:3, 16:9 and portrait without stretching, by path and, a fixed size asked for, stretched."""
    make_more(tmp_path / "checkpoint", "qwen2_5_vl")
    done = edgevlm("export", tmp_path / "checkpoint", "--out", tmp_path / "bundle", "--frame-size", "640x480")
    assert done.returncode == 0, done.stderr
    shapes = {"4:3": (128, 96), "16:9": (256, 144), "portrait": (72, 128)}
    videos = {name: write_video(tmp_path / f"{at}.avi", *size) for at, (name, size) in enumerate(shapes.items())}
    question = "how many are there now?"
    command = ["run", "--model", tmp_path / "bundle", "--ask", question, "--json", "--policy", "full", "--video"]
    held = {}
    for name, video in videos.items():
        done = edgevlm(*command, video)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines[-1]["frames"] == 12
        held[name] = lines[-1]["cache_tokens"] // 6
        assert any(line["event"] == "answer" and line["token_ids"] for line in lines)
    tokens = {name: round(height / 14) * round(width / 14) for name, (width, height) in shapes.items()}
    assert held == tokens
    done = edgevlm(*command, videos["portrait"], "--frame-size", "256x144")
    assert done.returncode == 0, done.stderr
