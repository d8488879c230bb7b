"""Live sources through OpenCV, from an MJPEG camera on loopback."""

import hashlib
import os
import re
import threading
import time

import numpy as np
import pytest
from cameras import Handler, MjpegCamera

from edgevlm.apps.sources import SourceError, SourceOptions, State, open_source
from edgevlm.apps.sources.opencv import SETTINGS


def test_a_slow_reader_gets_new_frames_and_drops_are_counted():
    before = {*threading.enumerate()}
    with MjpegCamera(frames=100) as camera:
        source = open_source(camera.url, None, SourceOptions(fps=1000))
        assert source.live
        first = source.read()
        assert first.image.shape == (48, 64, 3)
        while source.dropped < 15:
            time.sleep(0.01)
        source.read()  # waited in the slot
        later = source.read()
        assert later.image.mean() > first.image.mean() + 20, "not the frame after the first one"
        assert later.time_s - first.time_s > 0.2
        source.close()
        assert source.state is State.ENDED
        name = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
        assert os.environ.get(name) in (None, SETTINGS[name]), "a file opened next would get a camera's options"
        for thread in {*threading.enumerate()} - before:
            if thread.name == "edgevlm-reader":
                thread.join(120)
                assert not thread.is_alive()


def test_a_camera_that_hangs_up_is_connected_anew():
    with MjpegCamera(frames=10) as camera:
        source = open_source(camera.url, None, SourceOptions(fps=1000, backoff_s=(0.02, 0.1)))
        times = [source.read().time_s for _ in range(30)]
        assert source.reconnects >= 2, "it sends ten at a time"
        assert (np.diff(times) > 0).all()
        source.close()


def test_nobody_there_is_one_line():
    with pytest.raises(SourceError, match="Connection refused; --wait waits until it is there") as caught:
        open_source("http://user:secret@127.0.0.1:9/live", None, SourceOptions(fps=2))
    assert "secret" not in str(caught.value)


class DigestHandler(Handler):
    """Asks for the user ``u`` and the password ``p@ss/word`` by the Digest scheme (RFC 2617, MD5)."""

    def do_GET(self):
        given = dict(re.findall(r'(\w+)="?([^",]*)"?', self.headers.get("Authorization", "")))
        secret, request = (md5(text) for text in ("u:camera:p@ss/word", f"GET:{self.path}"))
        middle = ":".join(given.get(name, "") for name in ("nonce", "nc", "cnonce", "qop"))
        if given.get("response") == md5(f"{secret}:{middle}:{request}"):
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Digest realm="camera", nonce="n0nce", qop="auth"')
        self.end_headers()


def md5(text):
    return hashlib.md5(text.encode()).hexdigest()


@pytest.mark.parametrize(("password", "right"), [("p%40ss%2Fword", True), ("wrong", False)])
def test_digest(password, right):
    with MjpegCamera(frames=1000) as camera:
        camera.RequestHandlerClass = DigestHandler
        address = camera.url.replace("//", f"//u:{password}@")
        if right:
            source = open_source(address, None)
            assert source.read().image.shape == (48, 64, 3)
            source.close()
            return
        with pytest.raises(SourceError, match="401"):
            open_source(address, None)
