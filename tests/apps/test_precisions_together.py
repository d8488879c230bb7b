"""Precisions of weights, tower and cache in one bundle, as they are typed: made, run and calibrated."""

import json
from pathlib import Path

import checkpoints
import cv2
import numpy as np
import pytest
from typed import edgevlm

TOGETHER = {
    "int8 cache, int4": ["--precision", "int4", "--kv", "int8"],
    "all of int8": ["--precision", "int8", "--kv", "int8", "--vision-precision", "int8"],
}


def lines(*arguments: object) -> list[dict]:
    """Of ``edgevlm ARGUMENTS``."""
    done = edgevlm(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "square.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 4.0, (64, 64))
    for index in range(120):
        frame = np.full((64, 64, 3), 40, np.uint8)
        frame[index % 40 :][:20, 10:30] = (2 * index, 255 - 2 * index, 128)
        writer.write(frame)
    writer.release()
    return path


@pytest.mark.parametrize("options", TOGETHER.values(), ids=TOGETHER)
def test_one_bundle_of_several_precisions(options: list[str], video: Path, tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path / "checkpoint", "llava_onevision", max_positions=1024)
    bundle = tmp_path / "bundle"
    lines("export", tmp_path / "checkpoint", "--out", bundle, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "checkpoint"], "nothing else is left"
    asked = ("run", "--video", video, "--model", bundle, "--ask", "what is it?", "--json")
    *found, summary = lines(*asked, "--budget", 160, "--policy", "purekv:st_spattn=on", "--state", tmp_path / "state")
    assert [line["event"] for line in found if line["event"] != "stats"] == ["answer"]
    assert summary["compressions"] > 0
    found = lines("calibrate", bundle, "--video", video, "--policies", "uniform,last-seen", "--budget", "25%", "--json")
    (choice,) = (line for line in found if line["event"] == "choice")
    assert [line["event"] for line in found if line["event"].endswith("_choice")] == ["append_choice", "encode_choice"]
    *_, summary = lines(*asked, "--budget", choice["budget"])
    assert summary["policy"] == choice["policy"], "auto"
