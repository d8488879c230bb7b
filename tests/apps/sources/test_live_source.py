"""The state machine of live sources, on connections that do what a test says."""

import queue
import threading
import time
from dataclasses import replace
from itertools import islice
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from edgevlm.apps.run.process import source_news
from edgevlm.apps.sources import SourceError, SourceOptions, State
from edgevlm.apps.sources import live as live_module
from edgevlm.apps.sources.base import Connection, Grabbed
from edgevlm.apps.sources.live import ADRIFT, LiveSource, pauses
from edgevlm.errors import SourceRefused

OPTIONS = SourceOptions(
    fps=1e9, open_timeout_s=60, stall_timeout_s=0.7, read_timeout_s=2.5, backoff_s=(0.01, 0.02), rule="block"
)


class Scripted(Connection):
    """Gives what is put into it: pictures as Grabbed, None for the end, an exception to raise; hangs while there is nothing."""

    made: ClassVar[list] = []

    def __init__(self):
        self.script, self.closed = queue.Queue(), threading.Event()
        self.made.append(self)

    def say(self, *items):
        for item in items:
            self.script.put(item)
        return self

    def grab(self):
        item = self.script.get(timeout=120)
        if isinstance(item, Exception):
            raise item
        return item

    def retrieve(self):
        return np.zeros((2, 3, 3), np.uint8)

    def close(self):
        self.closed.set()


class Camera:
    """Hands out scripted connections one after the other; an exception in their place is raised."""

    def __init__(self, *answers):
        self.answers, self.dials = list(answers), 0

    def __call__(self):
        self.dials += 1
        answer = self.answers.pop(0) if self.answers else SourceError("nobody there")
        if isinstance(answer, Exception):
            raise answer
        return answer


class Reading(LiveSource):
    """As if somebody had read before: every picture counts."""

    _origin = 0.0


@pytest.fixture
def live():
    """Makes live sources of cameras, and closes them."""
    made: ClassVar[list] = []

    def make(camera, options=OPTIONS):
        made.append(Reading("camera", camera, options))
        return made[-1]

    yield make
    while Scripted.made:
        Scripted.made.pop().say(None)
    for source in made:
        source.close()


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_it_runs_stalls_runs_again_and_is_connected_anew(live):
    first, second = Scripted().say(Grabbed()), Scripted()
    source = live(Camera(first, second))
    news = source_news(source)
    assert source.read().image.shape == (2, 3, 3)
    assert (source.state, source.problem, next(news)) == (State.RUNNING, None, None)
    until(lambda: source.state is State.STALLED)
    assert next(news) == "camera: stalled (no frame for 0.7 s)"
    first.say(Grabbed())
    source.read()
    assert (source.state, source.reconnects) == (State.RUNNING, 0)
    assert next(news).startswith("camera: running again after ")
    until(lambda: source.state is State.RECONNECTING)
    assert next(news) == "camera: reconnecting (no frame for 2.5 s)"
    assert next(news) is None, "once is enough"
    second.say(Grabbed())
    source.read()
    assert (source.state, source.reconnects, source.problem) == (State.RUNNING, 1, None)
    first.say(Grabbed())
    assert first.closed.wait(120), "an abandoned connection is closed by its own thread, when it wakes"
    assert source.drops == {"late": 1}
    source.close()
    assert source.state is State.ENDED


@pytest.mark.parametrize(
    "end", [None, OSError(5, "the cable is out"), ValueError("rtsp://u:secret@h broke"), SourceError("out")]
)
def test_it_goes_on_whatever_ends_a_connection(live, end):
    camera = Camera(Scripted().say(Grabbed(), end), OSError("no"), ValueError("no"), Scripted().say(Grabbed()))
    source = live(camera)
    source.read()
    until(lambda: source.problem is not None or source.reconnects)
    assert "secret" not in (source.problem or "")
    assert source.read() is not None
    assert (source.reconnects, camera.dials) == (1, 4)


@pytest.mark.parametrize(
    ("first", "wait", "says"),
    [
        (SourceError("Connection refused"), False, "camera: Connection refused; add --wait to keep trying"),
        (SourceRefused("wrong password (401)"), True, r"camera: wrong password \(401\)$"),
        (SourceRefused("wrong password (401)"), False, r"camera: wrong password \(401\)$"),
    ],
)
def test_a_first_connection_that_fails_is_one_line(live, first, wait, says):
    with pytest.raises(SourceError, match=says) as caught:
        live(Camera(first), SourceOptions(wait=wait))
    assert "\n" not in str(caught.value)


def test_a_camera_that_is_not_there_yet_is_waited_for(live):
    camera = Camera(SourceError("Connection refused"), SourceError("Connection refused"), Scripted().say(Grabbed()))
    source = live(camera, SourceOptions(fps=1e9, wait=True, backoff_s=(0.2, 0.2)))
    until(lambda: source.problem is not None)
    assert source.state is State.INITIALISING
    assert next(source_news(source)) == "camera: waiting for the camera (Connection refused)"
    assert source.read() is not None
    assert (source.state, source.reconnects) == (State.RUNNING, 0)


def test_pictures_before_one_that_stands_alone_are_dropped(live):
    camera = Camera(
        Scripted().say(Grabbed(decoded=False), Grabbed(intra=False), Grabbed(), Grabbed(intra=False), None),
        Scripted().say(Grabbed(intra=False), Grabbed()),
    )
    source = live(camera)
    for _ in range(3):
        assert source.read() is not None
    assert source.drops == {"keyframe": 3}


def test_a_stream_without_pictures_that_stand_alone_is_shown_after_a_while(live, monkeypatch):
    monkeypatch.setattr(live_module, "KEYFRAME_WAIT_S", 0.5)
    connection = Scripted()
    source = live(Camera(connection), replace(OPTIONS, stall_timeout_s=120, read_timeout_s=120))
    connection.say(Grabbed(intra=False))
    until(lambda: source.drops["keyframe"] == 1)
    time.sleep(0.55)
    connection.say(Grabbed(decoded=False), Grabbed(intra=False))
    assert source.read() is not None
    assert source.drops == {"keyframe": 2}, "what is not decoded is no picture, however long it was waited for"


def test_damaged_pictures_are_dropped_and_alone_they_are_no_stream(live):
    damaged = Scripted()
    source = live(Camera(Scripted().say(Grabbed(), Grabbed(corrupt=True), Grabbed(), None), damaged))
    source.read()
    source.read()
    assert source.drops == {"corrupt": 1}
    until(lambda: source.state is State.RECONNECTING)
    while source.problem != "nobody there":
        damaged.say(Grabbed(corrupt=True))
        time.sleep(0.02)
    assert source.state is State.RECONNECTING


def test_connections_that_hang_for_good_are_few(live):
    hangs = [Scripted() for _ in range(ADRIFT + 3)]
    camera = Camera(Scripted().say(Grabbed()), *hangs)
    source = live(camera, SourceOptions(fps=1e9, read_timeout_s=0.3, backoff_s=(0.01, 0.01)))
    source.read()
    until(lambda: len(source._adrift) == ADRIFT)
    time.sleep(0.3)
    assert camera.dials == ADRIFT
    hangs[0].say(None)
    until(lambda: camera.dials == ADRIFT + 1)
    for connection in hangs:
        connection.say(None, None)


def test_pauses_grow_to_a_limit_with_jitter():
    made = list(islice(pauses(1, 30, Random(1)), 50))
    for pause, whole in zip(made, [1, 2, 4, 8, 16, *[30] * 45], strict=True):
        assert whole / 2 <= pause <= whole
    assert len(set(made)) == len(made), "no jitter"


class Unplugged(Scripted):
    """A USB camera whose driver repeats the last picture once it is unplugged; each step is a picture's grey level."""

    repeats = True

    def grab(self):
        level = super().grab()
        self.level = level
        return None if level is None else Grabbed()

    def retrieve(self):
        return np.full((2, 3, 3), self.level, np.uint8)


def test_a_stall_is_a_stall_even_if_pictures_repeat_bit_by_bit(live):
    first, second = Unplugged().say(1, 2), Unplugged()
    source = live(Camera(first, second))
    assert [source.read().image[0, 0, 0] for _ in range(2)] == [1, 2]
    stop = threading.Event()

    def repeat():
        while not stop.wait(0.02):
            first.say(2)

    driver = threading.Thread(target=repeat)
    driver.start()
    until(lambda: source.state is State.STALLED)
    assert source.problem == "the same picture for 0.7 s"
    first.say(3)
    assert [source.read().image[0, 0, 0] for _ in range(2)] == [3, 2], "it was not gone"
    until(lambda: source.state is State.RECONNECTING)
    stop.set()
    driver.join()
    second.say(4)
    assert source.read().image[0, 0, 0] == 4
    assert source.reconnects == 1
    assert source.drops["repeated"] > 10


def test_after_a_damaged_picture_a_keyframe_is_waited_for(live):
    smeared = [Grabbed(intra=False)] * 3
    camera = Scripted().say(Grabbed(1.0), Grabbed(corrupt=True), *smeared, Grabbed(2.0), Grabbed(intra=False))
    source = live(Camera(camera))
    for _ in range(3):
        source.read()
    until(lambda: source.drops == {"corrupt": 1, "keyframe": 3})
