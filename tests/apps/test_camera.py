"""Live sources through OpenCV: an MJPEG camera on loopback, made with the standard library."""

import http.server
import os
import threading
import time

import numpy as np
import pytest

from edgevlm.apps.sources import SourceError, State, open_source

cv2 = pytest.importorskip("cv2")


class MjpegCamera(http.server.ThreadingHTTPServer):
    """Serves frames whose brightness counts up, at 50 a second, until ``frames`` are sent."""

    daemon_threads = True

    def __init__(self, frames):
        super().__init__(("127.0.0.1", 0), Handler)
        self.frames = frames
        self.url = f"http://127.0.0.1:{self.server_port}/live"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for index in range(self.server.frames):
            _, jpeg = cv2.imencode(".jpg", np.full((48, 64, 3), (index * 2) % 250, np.uint8))
            self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg))
            self.wfile.write(jpeg.tobytes() + b"\r\n")
            time.sleep(0.02)

    def log_message(self, *_):
        """Quiet."""


def test_a_slow_reader_gets_new_frames_and_drops_are_counted():
    with MjpegCamera(frames=100) as camera:
        source = open_source(camera.url, None, fps=1000, realtime=False)
        assert source.live
        first = source.read()
        assert first.image.shape == (48, 64, 3)
        time.sleep(0.7)
        source.read()  # waited in the slot
        later = source.read()
        assert later.image.mean() > first.image.mean() + 20, "not the frame after the first one"
        assert later.time_s - first.time_s > 0.5
        assert source.dropped > 5
        source.close()
        assert source.state is State.ENDED
        assert "OPENCV_FFMPEG_CAPTURE_OPTIONS" not in os.environ, "a file opened next would get a camera's options"
        assert not [thread for thread in threading.enumerate() if thread.name == "edgevlm-reader"]


def test_a_camera_that_ends_ends_the_stream():
    with MjpegCamera(frames=10) as camera:
        source = open_source(camera.url, None, fps=1000, realtime=False)
        frames = list(source)
        assert 1 <= len(frames) <= 10
        assert source.state is State.ENDED


def test_nobody_there_is_one_line():
    with pytest.raises(SourceError, match="cannot be opened") as caught:
        open_source("http://user:secret@127.0.0.1:9/live", None, fps=2, realtime=False)
    assert "secret" not in str(caught.value)
