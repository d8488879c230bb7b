"""What a program with threads uses: answers that wait, questions that stay, what is in memory, and a memory that is saved."""

import re
import threading
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from edgevlm import Session, open_source
from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.sampling import Classified

QUESTION = "how many objects are there now?"
FRAMES = list(islice(open_source("demo"), 48))


@pytest.fixture
def session():
    with Session.open("demo", policy="last-seen", budget=256) as opened:
        yield opened


def watch(session, frames):
    for frame in frames:
        session.watch(frame.image, frame.time_s)


def test_every_attribute_of_an_answer_waits(session):
    watch(session, FRAMES[:8])
    release, append = threading.Event(), session._stream.append_question
    session._stream.append_question = lambda *rows: release.wait(10) and append(*rows)
    answer = session.ask(QUESTION)
    assert (answer.found.finish_reason, answer.finished) == (None, False)
    threading.Timer(0.1, release.set).start()
    assert answer.finish_reason == "stop"
    assert answer.finished
    assert answer.token_ids == answer.found.token_ids != []
    with pytest.raises(AttributeError, match="'Answer' object has no attribute 'length'"):
        answer.length  # noqa: B018
    assert repr(answer) == f"Answer({QUESTION!r}, {answer.text!r}, stop)"


def test_a_question_calls_back_when_its_answer_changes_and_not_between(session, monkeypatch):
    changes, looks, done, said = [], iter([0.1, 0.5, 0.7, 0.5, 0.3, 0.3]), threading.Event(), []

    def classify(questions, watch):
        if (probability := next(looks, None)) is None:
            done.set()
            probability = 0.3
        session._stats = replace(session._stats, frames=session._stats.frames + 1)
        return [Classified(float(session.stats.frames), {"yes": probability, "no": 1 - probability}, None)]

    def callback(change):
        changes.append((change.is_yes, change.probability))
        raise ValueError("robot fell over")

    watch(session, FRAMES[:4])
    session.notify = said.append
    monkeypatch.setattr(session, "classify", classify)
    standing = session.on("is there a circle now?", callback, every=0.01)
    assert done.wait(10)
    standing.cancel()
    assert changes == [(True, 0.7), (False, 0.3)]
    (line,) = said
    assert re.fullmatch(rf"callback failed: ValueError: robot fell over \({re.escape(__file__)}, line \d+\)", line)
    for every in (0, "1", float("nan"), 1e12):
        with pytest.raises(UserError, match=f"every={every!r}: give seconds above 0".replace("+", "\\+")):
            session.on("is there a circle now?", callback, every=every)


def test_cancelled_questions_do_not_pile_up(session):
    for _ in range(3):
        session.on("is there a circle now?", print).cancel()
    assert len(session._standing) == 1


def test_a_question_ends_with_its_session(session):
    watch(session, FRAMES[:8])
    standing = session.on("is there a circle now?", print, every=0.01)
    session.close()
    assert not standing.is_alive()


def test_memory_is_what_the_cache_holds_from_any_thread(session):
    watch(session, FRAMES)
    found = []
    thread = threading.Thread(target=lambda: found.append(session.memory()))
    thread.start()
    thread.join()
    cache, (held,) = session.cache, found
    vision = [cache.frame(layer)[head][cache.kind(layer)[head] == Kind.VISION] for layer in range(4) for head in range(2)]
    assert held.number.tolist() == np.unique(np.concatenate(vision)).tolist()
    assert held.tokens.tolist() == [max((of == frame).sum() for of in vision) for frame in held.number]
    np.testing.assert_allclose(held.seconds, [FRAMES[frame].time_s for frame in held.number], atol=1e-6)


def test_a_saved_session_continues_as_if_it_had_never_stopped(session, tmp_path):
    watch(session, FRAMES[:21])
    session.save(tmp_path / "state")
    watch(session, FRAMES[21:])
    with Session.open("demo", policy="last-seen", budget=256, state=tmp_path / "state") as other:
        assert repr(other) == f"Session(demo, last-seen, {other.stats.tokens} of 256 tokens, 21 frames, 10.5 s)"
        watch(other, FRAMES[21:])
        assert [part.tolist() for part in other.memory()] == [part.tolist() for part in session.memory()]
        assert other.ask(QUESTION).text == session.ask(QUESTION).text
        with pytest.raises(UserError, match="state"):
            session.save(tmp_path / "state")  # the other one writes there
    assert repr(other) == "Session(demo, closed)"


def test_public_objects_are_one_short_line(session):
    for each in (session, session.model, open_source("demo"), FRAMES[0], session.ask(QUESTION)):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 128
