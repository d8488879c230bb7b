"""An ordeal for a live source: a run watches a camera that dies and comes back in random order; nothing may be lost or left."""

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import gt

import psutil
from memory import arena

from edgevlm import Session
from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.sources import SourceOptions, State, open_source


class Silent:
    """An output that nobody reads."""

    def answer(self, answered): ...
    def piece(self, text): ...
    def stats(self, stats): ...
    def summary(self, stats, span): ...
    def notice(self, text): ...


class Watched:
    """A run in a thread of its own, and every frame that it has watched."""

    def __init__(self, source):
        self.frames, self.failure = [], None
        self.session = Session.open("demo", policy="infinipot-v", budget=256)
        self.run = RunLoop(self.session, source, Silent(), RunPlan())
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

    def wait_for(self, condition, what, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._thread.is_alive(), self.failure
            assert time.monotonic() < deadline, f"{what} ({self.run.source.state}, {self.run.source.problem})"
            time.sleep(0.002)

    def stop(self):
        self.run.stop()
        self._thread.join(120)
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


def hung_up(camera, watched):
    count = watched.run.source.reconnects
    camera.tell("hangup")
    watched.wait_for(lambda: watched.run.source.reconnects > count, "it is connected anew")


def locked(camera, watched):
    camera.tell("password another")
    camera.tell("hangup")
    watched.wait_for(lambda: "401" in (watched.run.source.problem or ""), "the camera wants another password")
    assert "right" not in watched.run.source.problem
    camera.tell("password right")


def resources():
    """Threads and descriptors of this process; those of a session are let go of with the last that knows it."""
    gc.collect()
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def settled(before, seconds=120):
    """What is open now, once it is no more than before; abandoned connections end within their own timeouts."""
    deadline = time.monotonic() + seconds
    while any(map(gt, now := resources(), before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


@dataclass(frozen=True)
class Ordeal:
    """``camera`` opens one whose password is right; ``url`` is its address; each of ``events`` leaves it running."""

    camera: Callable
    url: Callable
    options: SourceOptions
    events: tuple
    sizes: tuple

    def __call__(self, count, seed):
        """``count`` events in random order; returns what was watched and the source it came from."""
        order = [self.events[index % len(self.events)] for index in range(count)]
        random.Random(seed).shuffle(order)
        with self.camera() as camera:
            source = open_source(self.url(camera), None, self.options)
            watched = Watched(source)
            try:
                watched.wait_for(lambda: len(watched.frames) >= 3, "the first frames")
                for event in order:
                    event(camera, watched)
                    seen = len(watched.frames)
                    watched.wait_for(
                        lambda seen=seen: len(watched.frames) > seen + 1 and source.state is State.RUNNING,
                        f"frames after {event.__name__}",
                    )
            finally:
                watched.stop()
        return watched, source

    def check(self, count, seed):
        """Returns frames watched, reconnects and drops."""
        self(len(self.events), seed)  # what a first time opens for good: decoders' threads, caches
        before = resources()
        watched, source = self(count, seed)
        assert source.reconnects >= count * 0.5, "half of the events break the connection"
        assert source.state is State.ENDED
        times = [time_s for _, time_s in watched.frames]
        assert all(earlier < later for earlier, later in pairwise(times)), "time ran backwards"
        assert {image.shape[:2] for image, _ in watched.frames} == set(self.sizes)
        assert watched.memory == undisturbed(watched.frames)
        seen = len(times), source.reconnects, dict(source.drops)
        del watched, source
        after = settled(before)
        assert after[0] <= before[0], "threads are left"
        assert after[1] <= before[1], "descriptors are left"
        return seen


def undisturbed(frames):
    """The memory of a session that is given the same frames without a pause."""
    with Session.open("demo", policy="infinipot-v", budget=256) as session:
        for image, time_s in frames:
            session.watch(image, time_s)
        session.flush()
        return arena(session._stream)
