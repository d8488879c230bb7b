"""The Motion JPEG camera of mjpeg_server.py in this process: frames whose brightness counts up, at 50 a second."""

import threading
from pathlib import Path

import numpy as np
import pytest
from mjpeg_server import Camera

cv2 = pytest.importorskip("cv2")


class MjpegCamera(Camera):
    """Ends after ``frames`` frames, or ``hangs`` then."""

    pause = 0.02

    def __init__(self, frames, hangs=False):
        super().__init__(0, Path("/nonexistent"))
        shades = (cv2.imencode(".jpg", np.full((48, 64, 3), 2 * index, np.uint8))[1].tobytes() for index in range(125))
        self.pictures, self.frames, self.hangs = [list(shades)], frames, hangs
        self.url = f"http://127.0.0.1:{self.server_port}/live"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.hangups += 1
        self.shutdown()
