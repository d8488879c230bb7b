"""Live sources through OpenCV, from an MJPEG camera on loopback."""

import time
from functools import partial

import ordeal
import pytest
from ordeal import Ordeal, frozen, held_up, hung_up, locked
from processes import SIZES, mjpeg_camera

from edgevlm.apps.sources import SourceOptions, State, open_source


def url(camera):
    return f"http://127.0.0.1:{camera.port}/live"


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


READ_S, STALL_S = 0.25, 0.1
OPTIONS = SourceOptions(
    fps=50, open_timeout_s=READ_S, read_timeout_s=READ_S, stall_timeout_s=STALL_S, backoff_s=(0.02, 0.08), rule="block",
    wait=True,
)  # fmt: skip


def opened(folder):
    camera = mjpeg_camera(folder)
    camera.tell("password right")
    return camera


def address(camera):
    return f"http://u:right@127.0.0.1:{camera.port}/live"


def killed(camera, watched):
    ordeal.killed(camera, watched)
    camera.tell("password right")


def misbehaving(mode):
    def event(camera, watched):
        camera.tell(f"mode {mode}")
        watched.wait_for(lambda: watched.run.source.state is State.RECONNECTING, f"{mode} is noticed")
        camera.tell("mode ok")

    event.__name__ = mode
    return event


def slowed(camera, watched):
    count = len(watched.frames)
    camera.tell("pause 0.06")
    watched.wait_for(lambda: len(watched.frames) >= count + 3, "a slow camera is watched")
    camera.tell("pause 0.01")


def resized(camera, watched):
    size = SIZES.index(watched.frames[-1][0].shape[:2])
    camera.tell(f"size {1 - size}")
    watched.wait_for(lambda: watched.frames[-1][0].shape[:2] == SIZES[1 - size], "pictures of another size come whole")


EVENTS = (
    killed, frozen, held_up, slowed, hung_up, resized, locked, misbehaving("mute"), misbehaving("half"), misbehaving("garbage"),
)  # fmt: skip


@pytest.mark.parametrize("deaths", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_deaths(tmp_path, deaths):
    Ordeal(partial(opened, tmp_path), address, OPTIONS, EVENTS, SIZES).check(deaths, seed=5)
