"""RTSP cameras on loopback: Debian's python3-gi, gir1.2-gst-rtsp-server-1.0 and gstreamer1.0-plugins-{good,bad,ugly}."""

import random
import time

import numpy as np
import psutil
import pytest
from processes import rtsp_camera

from edgevlm.apps.sources import SourceError, SourceOptions, State, open_source

OPTIONS = SourceOptions(fps=100, open_timeout_s=4, stall_timeout_s=0.3, read_timeout_s=0.8, backoff_s=(0.05, 0.2))
PATIENT = SourceOptions(fps=100, open_timeout_s=60, stall_timeout_s=60, read_timeout_s=60)


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


def reach(source, state, seconds=120):
    deadline = time.monotonic() + seconds
    while source.state is not state:
        assert time.monotonic() < deadline, (source.state, source.problem)
        time.sleep(0.005)


def killed(camera, source):
    camera.kill()
    reach(source, State.RECONNECTING)
    camera.start()


def frozen(camera, source):
    camera.freeze()
    reach(source, State.RECONNECTING)
    camera.thaw()


def held_up(camera, source):
    camera.freeze()
    reach(source, State.STALLED)
    camera.thaw()


def test_deaths_of_an_rtsp_camera():
    order = [killed, frozen, held_up] * 4
    random.Random(3).shuffle(order)
    process = psutil.Process()
    with rtsp_camera() as camera:
        open_source(address(camera), None, OPTIONS).close()
        before = process.num_threads(), process.num_fds()
        source = open_source(address(camera), None, OPTIONS)
        last = frame_of(source)
        for event in order:
            event(camera, source)
            reach(source, State.RUNNING)
            frame = frame_of(source, lambda frame, last=last: frame.time_s > last.time_s)
            assert frame.image.shape == (240, 320, 3)
            last = frame
        assert source.reconnects >= 8
        source.close()
        deadline = time.monotonic() + 120
        while (process.num_threads() > before[0] or process.num_fds() > before[1]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.num_threads() <= before[0]
        assert process.num_fds() <= before[1]


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
