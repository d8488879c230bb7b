"""Cameras that send nothing, too much, or more than is watched: what is dropped is counted, and nobody waits for anybody."""

import time

import pytest
from processes import mjpeg_camera, rtsp_camera

from edgevlm.apps.sources import SourceOptions, State, open_source


def url(camera):
    return f"http://127.0.0.1:{camera.port}/live"


def test_nothing_at_all(tmp_path):
    """0 frames a second: connected, and never a picture."""
    with mjpeg_camera(tmp_path) as camera:
        camera.tell("mode mute")
        source = open_source(url(camera), None, SourceOptions(fps=10, stall_timeout_s=0.2, read_timeout_s=0.5))
        deadline = time.monotonic() + 120
        while source.problem is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (source.state, source.problem) == (State.INITIALISING, "no frame for 0.5 s")
        camera.tell("mode ok")
        assert source.read() is not None
        source.close()


def test_240_a_second(tmp_path):
    with mjpeg_camera(tmp_path) as camera:
        camera.tell(f"pause {1 / 240}")
        source = open_source(url(camera), None, SourceOptions(fps=20))
        times = [source.read().time_s for _ in range(20)]
        assert times[-1] - times[0] >= 19 / 20 - 0.05, "no more than are asked for"
        assert source.state is State.RUNNING
        source.close()


def test_240_a_second_of_rtsp():
    with rtsp_camera(160, 120, 240, 60) as camera:
        source = open_source(f"rtsp://127.0.0.1:{camera.port}/live", None, SourceOptions(fps=20))
        times = [source.read().time_s for _ in range(20)]
        assert times[-1] - times[0] >= 19 / 20 - 0.05
        source.close()


@pytest.mark.parametrize("rule", ["drop-oldest", "block"])
def test_a_slow_watcher_sees_new_frames_and_the_rest_is_counted(tmp_path, rule):
    """Under drop-oldest a frame waits in the slot no longer than one is watched; nothing piles up before it."""
    with mjpeg_camera(tmp_path) as camera:
        source = open_source(url(camera), None, SourceOptions(fps=100, rule=rule, stall_timeout_s=0.7, read_timeout_s=0.75))
        began, first = time.monotonic(), source.read().time_s
        watched = []
        for _ in range(3):
            time.sleep(0.8)  # longer than the timeouts: the watcher's slowness is not the camera's
            watched.append((source.read().time_s - first, time.monotonic() - began))
        ages = [now - time_s for time_s, now in watched]
        if rule == "drop-oldest":
            assert source.drops["replaced"] > 20
            assert max(ages) < 3, "frames pile up"
        else:
            assert source.dropped == 0
            assert min(ages) > 0.2, "it waited in the slot"
        assert (source.state, source.reconnects) == (State.RUNNING, 0)
        source.close()
