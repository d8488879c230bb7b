"""Kinds of source through the command: which is taken for what, what they share, and the gate."""

import json
import os
import threading

import numpy as np
import pytest
import yuv
from PIL import Image
from typer.testing import CliRunner

from edgevlm import Session
from edgevlm.apps.run.frame_preparation import FramePreparation
from edgevlm.apps.sources import SourceOptions, kind_of, open_source
from edgevlm.apps.sources.buffer import ReadAhead
from edgevlm.apps.sources.stdin import StdinSource
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.preprocess import Pixels

COUNT = "how many objects are there now?"


def run(*arguments):
    done = CliRunner().invoke(app, ["run", "--json", "--threads", "1", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("camera", "kind"),
    [
        (None, "demo"),
        ("demo", "demo"),
        ("-", "stdin"),
        ("0", "usb"),
        ("/dev/video3", "usb"),
        ("/dev/v4l/by-id/usb-Maker_Webcam-video-index0", "usb"),
        ("csi://0", "csi"),
        ("rtsp://10.0.0.5/live", "network"),
        ("rtspsrc location=rtsp://10.0.0.5/live ! rtph264depay ! avdec_h264", "gstreamer"),
        ("v4l2src device=/dev/video0 ! image/jpeg ! jpegdec", "gstreamer"),
    ],
)
def test_what_is_taken_for_what(camera, kind):
    assert kind_of(camera, None)[0] == kind


def test_a_path_is_a_file_or_a_folder(tmp_path):
    (tmp_path / "a.mp4").touch()
    for given in ((str(tmp_path), None), (None, str(tmp_path))):
        assert kind_of(*given)[0] == "folder"
    for given in ((str(tmp_path / "a.mp4"), None), (None, str(tmp_path / "a.mp4")), (None, "nowhere.mp4")):
        assert kind_of(*given)[0] == "video"
    assert kind_of(None, "-")[0] == "stdin"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"camera_fps": 0}, "--camera-fps 0"),
        ({"camera_fps": float("nan")}, "--camera-fps nan"),
        ({"pixel_format": "motion"}, "FourCC"),
        ({"pixel_format": "é"}, "FourCC"),
    ],
)
def test_wrong_options_are_one_line(options, says):
    with pytest.raises(UserError, match=says):
        SourceOptions(**options)


@pytest.mark.parametrize("size", ["1280", "0x720", "1280x", "axb", "-1x5"])
def test_a_wrong_size_is_one_line(size):
    done = CliRunner().invoke(app, ["run", "--size", size])
    assert isinstance(done.exception, UserError)
    assert "like 640x480" in str(done.exception)


@pytest.fixture
def still_folder(tmp_path):
    """Twelve pictures: gray, but the sixth to eighth are white."""
    for number in range(12):
        Image.fromarray(np.full((40, 60, 3), 255 if number in (5, 6, 7) else 90, np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def test_a_folder_ends_and_is_asked_at_its_end(still_folder):
    answer, summary = (line for line in run("--video", still_folder, "--ask", COUNT) if line["event"] != "stats")
    assert answer["time_s"] == 5.5
    assert (summary["frames"], summary["gated"], summary["source_state"]) == (12, 0, "ended")


@pytest.mark.parametrize(
    ("gate", "frames", "gated"), [("off", 12, 0), ("skip", 3, 9), ("thin:every=3", 5, 7), ("skip:threshold=250", 1, 11)]
)
def test_the_gate_holds_back_what_is_still_and_time_goes_on(still_folder, gate, frames, gated):
    asks = ("--ask", COUNT, "--ask-at", f"1.7:{COUNT}")
    lines = run("--video", still_folder, "--gate", gate, "--append", "all", *asks)
    assert [line["time_s"] for line in lines if line["event"] == "answer"] == [1.5, 5.5]
    assert (lines[-1]["frames"], lines[-1]["gated"], lines[-1]["dropped"]) == (frames, gated, 0)
    assert lines[-1]["cache_tokens"] == 16 * frames


def test_limits_count_frames_that_were_held_back(still_folder):
    summary = run("--video", still_folder, "--gate", "skip", "--frames", 4)[-1]
    assert (summary["frames"], summary["gated"]) == (1, 3)
    summary = run("--video", still_folder, "--gate", "skip", "--seconds", 2.6)[-1]
    assert (summary["frames"], summary["gated"]) == (2, 4)


def test_what_is_prepared_ahead_is_what_the_session_prepares(still_folder):
    memories = []
    for ahead in (False, True):
        source = open_source(None, str(still_folder))
        with Session.open("demo", budget=64) as session:
            if ahead:
                source.prepare = FramePreparation(session.prepare)
            for frame in source:
                assert (frame.pixels is not None) is ahead
                session.watch(frame.pixels if ahead else frame.image, frame.time_s)
            session.flush()
            memories.append([np.array(session.cache.key(layer)) for layer in range(2)])
    for plain, prepared in zip(*memories, strict=True):
        np.testing.assert_array_equal(plain, prepared)


def test_pixels_of_another_size_are_refused():
    with Session.open("demo", budget=64) as session, pytest.raises(UserError, match="prepared for another model"):
        session.watch(Pixels(np.zeros((3, 1, 1), np.float32)))


def test_a_pipe_that_stays_open_holds_nothing_up():
    out, into = os.pipe()
    source = ReadAhead(StdinSource(1000, descriptor=_writing(out, into)))
    assert source.read() is not None
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "edgevlm-reader"], "it was waited for in vain"
    os.close(out)
    os.close(into)


def _writing(out, into):
    os.write(into, yuv.noise_stream("420jpeg", 16, 12, 1)[0])
    return out


def test_the_demos_truth_is_that_of_the_time_asked_at():
    lines = run("--gate", "thin:threshold=255,every=5", "--frames", 60)
    answers = [line for line in lines if line["event"] == "answer"]
    assert {answer["time_s"] for answer in answers} == {8.0, 16.0, 24.0}, "every 16 frames, held back or not"
    assert all("truth" in answer for answer in answers)
    assert (lines[-1]["frames"], lines[-1]["gated"]) == (12, 48)
