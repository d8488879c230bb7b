"""Each way in which cameras go wrong, once; ``python tests/faults/cameras.py 1000 --cameras 10`` is more of it."""

import os
import subprocess
import sys

import pytest
from faults import cameras

ENDLESS = """
import threading, psutil
from http.client import HTTPMessage
from edgevlm.apps.sources.ffmpeg import MultipartConnection

class Response:
    def __init__(self):
        self.headers, self.left = HTTPMessage(), 8000
        self.headers["content-type"] = "multipart/x-mixed-replace; boundary=frame"
    def read1(self, size):
        self.left -= 1
        return (b"--frame\\r\\n\\r\\n" + bytes(size))[:size] if self.left > 0 else b""
    def close(self): ...

def read(barrier):
    connection = MultipartConnection(Response(), 600)
    barrier.wait()
    while connection.grab() is not None: ...
    connection.close()

def grown(threads):
    before, barrier = psutil.Process().memory_info().rss, threading.Barrier(threads)
    reading = [threading.Thread(target=read, args=(barrier,)) for _ in range(threads)]
    for each in reading: each.start()
    for each in reading: each.join()
    return psutil.Process().memory_info().rss - before

grown(1)
print(grown(8))
"""
GIGANTIC = """
import resource, sys, cv2
from edgevlm.apps.sources.opencv import decode_picture
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert decode_picture(bytes.fromhex(sys.argv[1])) is None
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_after_each_fault_pictures_come_again():
    found = cameras.run(len(cameras.KINDS), 9)
    assert found == dict.fromkeys(found, 0) | {
        "faults": len(cameras.KINDS), "met": len(cameras.KINDS), "reconnects": found["reconnects"]
    }  # fmt: skip
    assert found["reconnects"] >= len(cameras.ANSWERS)


@pytest.mark.parametrize(
    ("program", "argument"), [(ENDLESS, ""), (GIGANTIC, cameras.CLAIMED.hex())], ids=["an endless part", "a gigantic picture"]
)
def test_what_a_camera_sends_takes_no_memory(program, argument):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENCV_")}  # that we have set
    command = [sys.executable, "-c", program, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 40e6
