"""RTSP cameras on loopback: Debian's python3-gi, gir1.2-gst-rtsp-server-1.0 and gstreamer1.0-plugins-{good,bad,ugly}."""

import re
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from ordeal import Ordeal, frozen, held_up, hung_up, killed, locked
from processes import rtsp_camera

from edgevlm.apps.sources import SourceError, SourceOptions, open_source

# a busy GStreamer server sometimes never answers a client
PATIENT = SourceOptions(fps=100, open_timeout_s=20, stall_timeout_s=60, read_timeout_s=60, wait=True)


def address(camera, user=""):
    return f"rtsp://{user}127.0.0.1:{camera.port}/live"


def frame_of(source, wanted=lambda frame: True, seconds=120):
    deadline = time.monotonic() + seconds
    while not wanted(frame := source.read()):
        assert time.monotonic() < deadline
    return frame


def is_ball(image):
    """Black, and a white ball whose size is that of the picture's: nothing is cut off, and no padding shows."""
    grey = image.astype(int).mean(2)
    coloured = np.ptp(image.astype(int), axis=2) > 60
    share = (grey > 200).mean()
    return not coloured.any() and 0.002 < share < 0.05 and (grey < 40).mean() > 0.95


def test_the_picture_is_whole_from_the_first_frame_and_stamped():
    """A client that joins between two keyframes gets no grey, green or smeared picture."""
    with rtsp_camera(320, 240, 25, 40) as camera:
        early = open_source(address(camera), None, PATIENT)
        for _ in range(20):
            early.read()
        late = open_source(address(camera), None, PATIENT)
        frames = [late.read() for _ in range(5)]
        for frame in frames:
            assert is_ball(frame.image)
        early.close()
        late.close()


def without_parameter_sets(port):
    """Relay a camera's port, without the H.264 parameter sets in what it says of its stream; return the relay."""
    relay = socket.create_server(("127.0.0.1", 0))

    def shorten(data):
        told = re.sub(rb"sprop-parameter-sets=[^;\r\n]*;?", b"", data)
        length = re.search(rb"Content-Length: (\d+)", told)
        less = len(data) - len(told)
        return told.replace(length[0], b"Content-Length: %d" % (int(length[1]) - less)) if less else data

    def pump(source, target, change):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                client, camera = relay.accept()[0], socket.create_connection(("127.0.0.1", port))
                threading.Thread(target=pump, args=(client, camera, bytes), daemon=True).start()
                threading.Thread(target=pump, args=(camera, client, shorten), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return relay


def test_a_camera_that_does_not_describe_its_pictures_is_watched_from_a_keyframe():
    with rtsp_camera(320, 240, 25, 75) as camera, without_parameter_sets(camera.port) as relay:
        first = open_source(address(camera), None, PATIENT)
        first.read()
        source = open_source(f"rtsp://127.0.0.1:{relay.getsockname()[1]}/live", None, PATIENT)
        assert all(is_ball(source.read().image) for _ in range(5))
        source.close()
        first.close()


@pytest.mark.parametrize(
    ("user", "path", "says"), [("u:wrong@", "", "401"), ("", "", "401"), ("u:right@", "/none", "404"), ("u:right@", "", None)]
)
def test_a_password_is_asked_for(user, path, says):
    with rtsp_camera(320, 240, 25, 25, "right") as camera:
        url = address(camera, user) + path
        if says is None:
            source = open_source(url, None, PATIENT)
            assert source.name == f"rtsp://***@127.0.0.1:{camera.port}/live"
            frame_of(source)
            source.close()
            return
        with pytest.raises(SourceError, match=says) as caught:
            open_source(url, None, PATIENT)
        assert not any(word in str(caught.value) for word in ("wrong@", "right", "\n"))


OPTIONS = SourceOptions(fps=50, open_timeout_s=4, stall_timeout_s=0.3, read_timeout_s=0.8, backoff_s=(0.05, 0.2), rule="block")
SIZES = ((240, 320), (360, 480))


def opened():
    return rtsp_camera(320, 240, 25, 5, "right")


def chaos_address(camera):
    return f"rtsp://u:right@127.0.0.1:{camera.port}/live"


def slowed(camera, watched):
    count = len(watched.frames)
    camera.tell("fps 5")
    watched.wait_for(lambda: len(watched.frames) >= count + 5, "a slow camera is watched")
    camera.tell("fps 25")


def resized(camera, watched):
    """In the running stream; a new connection begins with the first size again."""
    height, width = size = SIZES[1 - SIZES.index(watched.frames[-1][0].shape[:2])]
    camera.tell(f"size {width} {height}")
    watched.wait_for(lambda: watched.frames[-1][0].shape[:2] == size, "pictures of another size come whole")


EVENTS = (killed, frozen, held_up, slowed, hung_up, resized, locked)


@pytest.mark.parametrize("events", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_deaths_of_an_rtsp_camera(events):
    Ordeal(opened, chaos_address, OPTIONS, EVENTS, SIZES).check(events, seed=5)
