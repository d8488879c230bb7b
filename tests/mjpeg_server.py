"""A camera as a process of its own, standard library only: Motion JPEG over HTTP, made to misbehave by lines on its stdin.

``python mjpeg_server.py PORT FOLDER``: FOLDER has pictures of two sizes, ``0-N.jpg`` and ``1-N.jpg``, sent at 100 a second.
A line on stdin sets one thing: ``mode ok|mute|half|garbage``, ``size 0|1``, ``pause SECONDS`` between two pictures,
``password WORD`` (of the user ``u``; empty for none), ``hangup`` (every connection, now).
"""

import base64
import http.server
import math
import sys
import threading
import time
from pathlib import Path


class Camera(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    mode, size, pause, password, hangups = "ok", 0, 0.01, "", 0
    frames, hangs = math.inf, False  # after so many it hangs up, or sends nothing more

    def __init__(self, port, folder):
        super().__init__(("127.0.0.1", port), Handler)
        self.pictures = [[path.read_bytes() for path in sorted(folder.glob(f"{size}-*.jpg"))] for size in (0, 1)]

    def obey(self, line):
        name, _, value = line.strip().partition(" ")
        if name == "hangup":
            self.hangups += 1
        else:
            setattr(self, name, type(getattr(self, name))(value))

    def handle_error(self, *_):
        """Quiet: a reader that has enough hangs up."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        camera, count = self.server, 0
        if camera.password and self.headers.get("Authorization") != "Basic " + self.expected():
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="camera"')
            self.end_headers()
            return
        hangups = camera.hangups
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        while camera.hangups == hangups and (count < camera.frames or camera.hangs):
            pictures = camera.pictures[camera.size]
            if camera.mode != "mute" and count < camera.frames:
                self.send(pictures[count % len(pictures)], camera.mode)
                count += 1
            time.sleep(camera.pause)

    def expected(self):
        return base64.b64encode(f"u:{self.server.password}".encode()).decode()

    def send(self, picture, mode):
        picture = b"\0" * len(picture) if mode == "garbage" else picture
        self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(picture))
        if mode == "half":
            self.wfile.write(picture[: len(picture) // 2])
            while self.server.mode == "half":
                time.sleep(0.01)
            picture = picture[len(picture) // 2 :]
        self.wfile.write(picture + b"\r\n")

    def log_message(self, *_):
        """Quiet."""


if __name__ == "__main__":
    camera = Camera(int(sys.argv[1]), Path(sys.argv[2]))
    threading.Thread(target=camera.serve_forever, daemon=True).start()
    print(camera.server_port, flush=True)
    for line in sys.stdin:
        camera.obey(line)
