"""Real GStreamer pipelines, where PyGObject has GStreamer."""

import subprocess
import sys
from pathlib import Path

import pytest

from edgevlm.apps.sources import gstreamer
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.errors import SourceRefused


def test_without_any_gstreamer_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "gi", None)
    gstreamer.load_gst.cache_clear()
    with pytest.raises(SourceRefused, match=r"GStreamer requires PyGObject .* apt install") as caught:
        gstreamer.GstPipeline("videotestsrc ! fakesink", SourceOptions())
    assert "\n" not in str(caught.value)


def test_real_pipelines():
    """In a process of their own: GStreamer's libraries and those that torch's exporter loads abort in one process."""
    ask = "from edgevlm.apps.sources.gstreamer import load_gst; load_gst()"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if asked.returncode:
        pytest.skip(asked.stderr.splitlines()[-1])
    file = str(Path(__file__).with_name("real_gstreamer.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
