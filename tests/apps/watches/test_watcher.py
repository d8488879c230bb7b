"""The watches of one camera: what is asked when, and the events that come of it."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from edgevlm.apps.run.thumbnails import Thumbnails
from edgevlm.apps.sources import Frame
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.watch import Watch
from edgevlm.apps.watches.watcher import Watcher
from edgevlm.errors import UserError
from edgevlm.runtime.evidence import Evidence, Moment
from edgevlm.runtime.sampling import Classified


class ScriptedSession:
    """Answers with the probabilities it is given; ``most``: questions that it answers at once."""

    def __init__(self):
        self.time_s, self.stats = 0.0, SimpleNamespace(frames=0)
        self.yes, self.asked, self.most = 0.0, [], 64

    def check(self, question, choices=()):
        if "?" not in question:
            raise UserError("ask a question")

    def classify(self, questions, *, watch):
        self.asked.append([question for question, _ in questions])
        moment = Moment(0, 0, 0.5, 0.5, 0.4, (0.0, 0.0, 0.5, 0.5))
        looked = SimpleNamespace(evidence=lambda: Evidence((moment,), True))
        return [Classified(self.time_s, {"yes": self.yes, "no": 1 - self.yes}, looked) for _ in questions[: self.most]]


class Camera:
    """A watcher whose rounds the test makes."""

    def __init__(self, monkeypatch, **options):
        monkeypatch.setattr(threading.Thread, "start", lambda self: None)
        monkeypatch.setattr(threading.Thread, "join", lambda self, *_: None)
        self.session, self.events, self.changes = ScriptedSession(), [], []
        self.watcher = Watcher(
            "door", self.session, Thumbnails(), taught=lambda question: question, changed=self.changes.append,
            record=lambda watch, event, pictures: self.events.append((event, pictures)), **options,
        )  # fmt: skip

    def frame(self, time_s, yes, image=None):
        """The events that a frame brings."""
        self.session.time_s, self.session.yes = time_s, yes
        self.session.stats.frames += 1
        before = len(self.events)
        self.watcher.watch(Frame(np.zeros((32, 32, 3), np.uint8) if image is None else image, time_s))
        self.watcher.ask()
        return [event.state for event, _ in self.events[before:]]


@pytest.fixture
def camera(monkeypatch):
    return Camera(monkeypatch)


QUESTION = "is somebody there?"


def watch(question=QUESTION, **settings):
    return Watch(question=question, **{"open_after": 0, "close_after": 0, **settings})


def test_events_have_the_frame_that_was_asked_about_and_what_was_looked_at(camera):
    camera.watcher.add(watch())
    assert camera.frame(0.5, 0.1) == []
    assert camera.frame(1.0, 0.9) == ["open"]
    assert camera.frame(1.5, 0.1) == ["close"]
    (opened, pictures), (closed, _) = camera.events
    assert opened.opened == closed.opened == opened.time
    assert opened.id != closed.id
    assert (opened.camera, opened.watch, opened.question) == ("door", "is-somebody-there", QUESTION)
    assert [moment["time_s"] for moment in opened.evidence] == [1.0, 0.5]
    assert len(pictures) == 2
    assert pictures[0].startswith(b"\xff\xd8")
    assert pictures[1] is None  # no thumbnail of it was kept
    assert [change["state"] for change in camera.changes] == ["closed", "open", "closed"]


def test_after_a_restart_an_open_watch_stays_open_and_closes(monkeypatch):
    last = WatchEvent("door", "is-somebody-there", "open", 1000.0, 0.9, 1000.0)
    camera = Camera(monkeypatch, last=lambda camera, watch: last)
    camera.watcher.add(watch())
    assert camera.frame(0.5, 0.9) == []
    assert camera.frame(1.0, 0.1) == ["close"]
    assert camera.events[0][0].opened == 1000.0


def test_a_recording_that_begins_anew_is_not_judged_again(monkeypatch):
    last = WatchEvent("door", "is-somebody-there", "open", 1000.0, 0.9, 1000.0, [{"until_s": 1.0}])
    camera = Camera(monkeypatch, last=lambda camera, watch: last, replays=True)
    camera.watcher.add(watch())
    assert [camera.frame(time_s, yes) for time_s, yes in [(0.5, 0.1), (1.0, 0.9), (1.5, 0.9)]] == [[], [], []]
    assert camera.frame(2.0, 0.1) == ["close"]


def test_a_paused_watch_closes_and_is_not_asked(camera):
    camera.watcher.add(watch())
    camera.frame(1.0, 0.9)
    camera.watcher.pause("is-somebody-there", True)
    assert camera.events[-1][0].state == "close"
    assert camera.frame(2.0, 0.9) == []
    assert len(camera.session.asked) == 1
    camera.watcher.pause("is-somebody-there", False)
    assert camera.frame(3.0, 0.9) == ["open"]


def test_no_picture_of_a_time_that_was_forgotten_is_in_an_event(camera):
    camera.watcher.add(watch())
    assert camera.frame(1.0, 0.9) == ["open"]
    camera.watcher.forget(0.0, 2.0)
    camera.watcher.ask()
    camera.watcher.pause("is-somebody-there", True)
    event, pictures = camera.events[-1]
    assert (event.state, event.evidence, pictures) == ("close", [], [])


def test_a_watch_is_asked_every_so_often_or_when_the_picture_changed(camera):
    camera.watcher.add(watch("a?", every=1))
    camera.watcher.add(watch("b?", changed=True))
    white = np.full((32, 32, 3), 255, np.uint8)
    for time_s, image in [(0.5, None), (1.0, None), (1.5, None), (2.0, white), (2.5, white)]:
        camera.frame(time_s, 0.1, image)
    assert camera.session.asked == [["a?", "b?"], ["a?"], ["b?"], ["a?"]]


def test_a_round_that_fails_is_told_of_once_and_the_next_is_asked(monkeypatch):
    said = []
    camera = Camera(monkeypatch, notify=said.append)
    camera.watcher.add(watch())
    monkeypatch.undo()
    failing = iter([RuntimeError("it broke")] * 2)

    def classify(questions, *, watch):
        for error in failing:
            raise error
        camera.watcher._closing = True
        return ScriptedSession.classify(camera.session, questions, watch=watch)

    camera.session.classify = classify
    thread = threading.Thread(target=camera.watcher._ask)
    thread.start()
    while thread.is_alive():
        camera.watcher.watch(Frame(np.zeros((32, 32, 3), np.uint8), 1.0))
        thread.join(0.01)
    assert said == ["watches: unexpected RuntimeError: it broke"]
    assert len(camera.session.asked) == 1
