"""A run on a camera that dies, freezes, lies and comes back many times: it goes on, and its memory is what it was."""

from functools import partial

import ordeal
import pytest
from ordeal import Ordeal, frozen, held_up, hung_up, locked
from processes import SIZES, mjpeg_camera

from edgevlm.apps.sources import SourceOptions, State

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


def camera_ordeal(folder):
    return Ordeal(partial(opened, folder), address, OPTIONS, EVENTS, SIZES)


def test_forty_deaths(tmp_path):
    camera_ordeal(tmp_path).check(40, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_deaths(tmp_path, seed):
    camera_ordeal(tmp_path).check(1000, seed)
