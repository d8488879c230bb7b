"""A run on an RTSP camera that dies, freezes and comes back a hundred times; what it needs stands in test_rtsp.py."""

import pytest
from ordeal import Ordeal, frozen, held_up, hung_up, killed, locked
from processes import rtsp_camera

from edgevlm.apps.sources import SourceOptions

OPTIONS = SourceOptions(fps=50, open_timeout_s=4, stall_timeout_s=0.3, read_timeout_s=0.8, backoff_s=(0.05, 0.2), rule="block")
SIZES = ((240, 320), (360, 480))


def opened():
    return rtsp_camera(320, 240, 25, 5, "right")


def address(camera):
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


@pytest.mark.slow
def test_a_hundred_deaths_of_an_rtsp_camera(capsys):
    frames, reconnects, drops = Ordeal(opened, address, OPTIONS, EVENTS, SIZES).check(100, seed=5)
    with capsys.disabled():
        print(f"\n100 events: {frames:,} frames watched, {reconnects} reconnects, {drops} dropped")
