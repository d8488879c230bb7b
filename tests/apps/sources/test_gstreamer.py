"""GStreamer pipelines: what is recognised and completed; and, where PyGObject has GStreamer, real ones."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgevlm.apps.sources import gstreamer
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.errors import SourceRefused

END = " ! videoconvert ! video/x-raw,format=BGR ! appsink name=edgevlm max-buffers=1 drop=true sync="
OPTIONS = SourceOptions()


@pytest.mark.parametrize(
    ("pipeline", "whole"),
    [
        ("a ! b", "a ! b" + END + "false"),
        ("a ! b ! ", "a ! b" + END + "false"),
        ("filesrc location=a.mp4 ! b", "filesrc location=a.mp4 ! b" + END + "true"),
        ("a ! appsink", "a ! appsink"),
        ("a ! appsink name=x drop=true", "a ! appsink name=x drop=true"),
        ("appsinkless ! b", "appsinkless ! b" + END + "false"),
    ],
)
def test_a_pipeline_gets_the_sink_it_lacks(pipeline, whole):
    assert gstreamer.with_sink(pipeline, "BGR") == whole


@pytest.mark.parametrize(("layout", "channels"), [("RGB", 3), ("BGR", 3), ("RGBx", 4), ("BGRx", 4), ("BGRA", 4)])
@pytest.mark.parametrize("padding", [0, 3])
def test_packed_pixels_of_any_order_are_rgb(layout, channels, padding):
    rows = np.random.default_rng(0).integers(0, 256, (4, 5 * channels + padding), np.uint8)
    image = gstreamer.packed_rgb(rows.tobytes(), layout, 4, 5)
    for y in range(4):
        for x in range(5):
            pixel = rows[y, x * channels : (x + 1) * channels]
            assert list(image[y, x]) == [pixel[layout.index(colour)] for colour in "RGB"]


def test_without_any_gstreamer_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(gstreamer, "opencv_problem", lambda: "this OpenCV was built without GStreamer")
    monkeypatch.setattr(gstreamer, "pygobject_problem", lambda: "PyGObject is not installed")
    with pytest.raises(SourceRefused, match="OpenCV was built without GStreamer, and PyGObject is not installed") as caught:
        gstreamer.connect("videotestsrc ! fakesink", OPTIONS)
    assert "\n" not in str(caught.value)


def test_real_pipelines():
    """In a process of their own: GStreamer's libraries and those that torch's exporter loads abort in one process."""
    ask = "from edgevlm.apps.sources.gstreamer import pygobject_problem; print(pygobject_problem() or '')"
    problem = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    if problem:
        pytest.skip(problem)
    file = str(Path(__file__).with_name("real_gstreamer.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
