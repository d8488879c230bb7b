"""Cameras that are processes of their own, to be killed, frozen and restarted."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
