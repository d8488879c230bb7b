"""Cameras that are processes of their own, to be killed, frozen and restarted."""

import functools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SYSTEM_PYTHON = "/usr/bin/python3"  # which has the bindings of Debian's packages
HERE = Path(__file__).parent
SIZES = ((48, 64), (90, 120))  # height, width of the pictures


class ServerProcess:
    """A server that prints its port when it is ready and obeys lines on its stdin."""

    def __init__(self, *command):
        self._command = list(map(str, command))
        self.port = 0
        self.start()

    def start(self):
        """On the port it had before, where it had one."""
        command = [part.replace("PORT", str(self.port)) for part in self._command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._process.stdout.readline())

    def tell(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self):
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def mjpeg_camera(folder):
    """A Motion JPEG camera on loopback whose pictures, of SIZES, it is given in ``folder``."""
    cv2 = pytest.importorskip("cv2")
    for size, (height, width) in enumerate(SIZES):
        for index in range(10):
            picture = np.random.default_rng(index).integers(0, 255, (6, 8, 3), np.uint8)
            cv2.imwrite(f"{folder}/{size}-{index}.jpg", cv2.resize(picture, (width, height), interpolation=cv2.INTER_NEAREST))
    return ServerProcess(sys.executable, "-S", HERE / "mjpeg_server.py", "PORT", folder)


@functools.cache
def _no_rtsp():
    """Why no RTSP camera can be run here; empty where one can."""
    look = (
        "import gi; gi.require_version('Gst', '1.0'); gi.require_version('GstRtspServer', '1.0')\n"
        "from gi.repository import Gst, GstRtspServer; Gst.init(None)\n"
        "missing = [name for name in ('x264enc', 'rtph264pay') if not Gst.ElementFactory.find(name)]\n"
        "raise SystemExit(', '.join(missing) or None)"
    )
    try:
        done = subprocess.run([SYSTEM_PYTHON, "-c", look], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def rtsp_camera(width=320, height=240, fps=25, keyframe_every=25, *password):
    """An RTSP camera on loopback, ``rtsp://127.0.0.1:PORT/live``. Skips the test, with the reason, where there is none."""
    pytest.importorskip("av")
    if reason := _no_rtsp():
        pytest.skip(f"no GStreamer RTSP server for {SYSTEM_PYTHON}: {reason}")
    return ServerProcess(SYSTEM_PYTHON, HERE / "rtsp_server.py", "PORT", width, height, fps, keyframe_every, *password)
