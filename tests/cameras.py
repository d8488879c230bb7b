"""An MJPEG camera on loopback, made with the standard library."""

import http.server
import threading
import time

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")


class MjpegCamera(http.server.ThreadingHTTPServer):
    """Serves frames whose brightness counts up, at 50 a second, until ``frames`` are sent; then it ends, or ``hangs``."""

    daemon_threads = True

    def __init__(self, frames, hangs=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.frames, self.hangs, self.closing = frames, hangs, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/live"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.shutdown()

    def handle_error(self, *_):
        """Quiet: a reader that has enough hangs up."""


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
        if self.server.hangs:
            self.server.closing.wait()

    def log_message(self, *_):
        """Quiet."""
