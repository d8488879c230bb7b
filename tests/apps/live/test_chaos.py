"""A run on a camera that dies, freezes, lies and comes back a hundred times: it goes on, and its memory is what it was."""

import gc
import random
import threading
import time
from itertools import pairwise
from operator import gt

import psutil
import pytest
from memory import arena
from processes import SIZES, mjpeg_camera

from edgevlm import Session
from edgevlm.apps.run import Plan, Run
from edgevlm.apps.sources import SourceOptions, State, open_source

READ_S, STALL_S = 0.25, 0.1
OPTIONS = SourceOptions(
    fps=50, open_timeout_s=READ_S, read_timeout_s=READ_S, stall_timeout_s=STALL_S, backoff_s=(0.02, 0.08), rule="block"
)


class Silent:
    """An output that nobody reads."""

    def answer(self, answered): ...
    def piece(self, text): ...
    def stats(self, stats): ...
    def summary(self, stats): ...
    def notice(self, text): ...


class Watched:
    """A run in a thread of its own, and every frame that it has watched."""

    def __init__(self, source):
        self.frames, self.failure = [], None
        self.session = Session.open("demo", policy="infinipot-v", budget=256)
        self.run = Run(self.session, source, Silent(), Plan())
        watch, close = self.session.watch, self.session.close
        self.session.watch = lambda image, time_s: (self.frames.append((image, time_s)), watch(image, time_s))
        self.session.close = lambda: (self.session.flush(), setattr(self, "memory", arena(self.session._stream)), close())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self.run()
        except BaseException as error:
            self.failure = error

    def wait_for(self, condition, what, seconds=10):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._thread.is_alive(), self.failure
            assert time.monotonic() < deadline, f"{what} ({self.run.source.state}, {self.run.source.problem})"
            time.sleep(0.002)

    def stop(self):
        self.run.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self.failure is None


def killed(camera, watched):
    camera.kill()
    watched.wait_for(lambda: watched.run.source.state is State.RECONNECTING, "a killed camera is noticed")
    camera.start()


def frozen(camera, watched):
    camera.freeze()
    watched.wait_for(lambda: watched.run.source.state is State.RECONNECTING, "a frozen camera is given up")
    camera.thaw()


def held_up(camera, watched):
    camera.freeze()
    watched.wait_for(lambda: watched.run.source.state is not State.RUNNING, "a camera that stalls is said to")
    camera.thaw()


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


def hung_up(camera, watched):
    count = watched.run.source.reconnects
    camera.tell("hangup")
    watched.wait_for(lambda: watched.run.source.reconnects > count, "it is connected anew")


def resized(camera, watched):
    size = SIZES.index(watched.frames[-1][0].shape[:2])
    camera.tell(f"size {1 - size}")
    watched.wait_for(lambda: watched.frames[-1][0].shape[:2] == SIZES[1 - size], "pictures of another size come whole")


def locked(camera, watched):
    camera.tell("password another")
    camera.tell("hangup")
    watched.wait_for(lambda: "401" in (watched.run.source.problem or ""), "the camera wants another password")
    assert "right" not in watched.run.source.problem
    camera.tell("password right")


EVENTS = (
    killed, frozen, held_up, slowed, hung_up, resized, locked, misbehaving("mute"), misbehaving("half"), misbehaving("garbage"),
)  # fmt: skip


def resources():
    """Threads and descriptors of this process; those of a session are let go of with the last that knows it."""
    gc.collect()
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def settled(before, seconds=5):
    """What is open now, once it is no more than before; abandoned connections end within their own timeouts."""
    deadline = time.monotonic() + seconds
    while any(map(gt, now := resources(), before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def chaos(folder, count, seed):
    """``count`` events in random order; returns what was watched and the source it came from."""
    order = [EVENTS[index % len(EVENTS)] for index in range(count)]
    random.Random(seed).shuffle(order)
    with mjpeg_camera(folder) as camera:
        camera.tell("password right")
        source = open_source(f"http://u:right@127.0.0.1:{camera.port}/live", None, OPTIONS)
        watched = Watched(source)
        try:
            watched.wait_for(lambda: len(watched.frames) >= 3, "the first frames")
            for event in order:
                event(camera, watched)
                if event is killed:
                    camera.tell("password right")
                seen = len(watched.frames)
                watched.wait_for(
                    lambda seen=seen: len(watched.frames) > seen + 1 and source.state is State.RUNNING,
                    f"frames after {event.__name__}",
                )
        finally:
            watched.stop()
    return watched, source


def undisturbed(frames):
    """The memory of a session that is given the same frames without a pause."""
    with Session.open("demo", policy="infinipot-v", budget=256) as session:
        for image, time_s in frames:
            session.watch(image, time_s)
        session.flush()
        return arena(session._stream)


def check(folder, count, seed):
    chaos(folder, 10, seed)  # what a first time opens for good: decoders' threads, caches
    before = resources()
    watched, source = chaos(folder, count, seed)
    assert source.reconnects >= count * 0.5, "half of the events break the connection"
    assert source.state is State.ENDED
    times = [time_s for _, time_s in watched.frames]
    assert all(earlier < later for earlier, later in pairwise(times)), "time ran backwards"
    assert {image.shape[:2] for image, _ in watched.frames} == set(SIZES)
    assert watched.memory == undisturbed(watched.frames)
    del watched, source
    after = settled(before)
    assert after[0] <= before[0], "threads are left"
    assert after[1] <= before[1], "descriptors are left"


def test_a_hundred_deaths(tmp_path):
    check(tmp_path, 100, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_deaths(tmp_path, seed):
    check(tmp_path, 1000, seed)
