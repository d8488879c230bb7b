"""Real pipelines through PyGObject; test_gstreamer.py runs this file in a process of its own."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.apps.sources import gstreamer
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.cli import app
from edgevlm.errors import SourceError

OPTIONS = SourceOptions(open_timeout_s=5, read_timeout_s=2)
RED = (
    "videotestsrc num-buffers=5 pattern=solid-color foreground-color=0xffff2000 ! video/x-raw,width=66,height=48,framerate=10/1"
)


@pytest.mark.parametrize("end", ["", " ! videoconvert ! video/x-raw,format=BGRx", " ! videoconvert !"])
def test_a_real_pipeline_gives_its_pictures_and_ends(end):
    pipeline = gstreamer.GstPipeline(RED + end, OPTIONS, newest=False)
    stamps = []
    while (grabbed := pipeline.grab()) is not None:
        stamps.append(grabbed.stamp_s)
        image = pipeline.retrieve()
        assert image.shape == (48, 66, 3)
        assert np.abs(image.reshape(-1, 3).astype(int) - (255, 32, 0)).max() <= 3
    pipeline.close()
    assert np.allclose(stamps, [0, 0.1, 0.2, 0.3, 0.4])
    assert pipeline.finished


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("nosuchelement ! identity", "invalid pipeline .*nosuchelement"),
        ("filesrc location=/nowhere.mp4 ! decodebin", "does not run"),
        ("v4l2src device=/dev/video99 ! identity", "does not run: .*/dev/video99"),
    ],
)
def test_a_real_pipeline_that_does_not_run_is_one_line(pipeline, says):
    with pytest.raises(SourceError, match=says) as caught:
        gstreamer.GstPipeline(pipeline, OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_pipeline_through_the_command():
    pipeline = "videotestsrc num-buffers=60 pattern=ball ! video/x-raw,width=64,height=48,framerate=10/1"
    asked = ["--fps", "10", "--seconds", "2", "--ask", "how many objects are there now?"]
    done = CliRunner().invoke(app, ["run", "--json", "--threads", "1", "--camera", pipeline, *asked], catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["frames"] > 0
    assert lines[-1]["source_state"] == "ended"
    assert [line["event"] for line in lines if line["event"] == "answer"] == ["answer"]
