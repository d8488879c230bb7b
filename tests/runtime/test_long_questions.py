"""Questions longer than what is set aside: room is taken when they come and given back, and frames come in meanwhile."""

import itertools
import threading

import numpy as np
import pytest

from edgevlm.apps.sources import open_source
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

NOW, WAIT_S = "how many objects are there now?", 120
LONG = " ".join([NOW] * 200)  # 1,400 tokens


@pytest.fixture(scope="module")
def model():
    loaded = Model.load("demo")
    yield loaded
    loaded.close()


def watched(model, frames, **settings):
    session = Session.open(model, budget=256, **settings)
    for frame in itertools.islice(open_source("demo"), frames):
        session.watch(frame.image, frame.time_s)
    return session


def held(session):
    stream = session._stream
    parts = [part.copy() for layer in range(stream.cache.layers) for part in stream.cache.held(layer).values()]
    return parts, stream.positions.mark(), stream.cache.nbytes


@pytest.mark.parametrize("policy", ["infinipot-v", "h2o"])
@pytest.mark.parametrize("append", ["all", "changed"])
def test_room_is_taken_when_it_comes_and_given_back(model, policy, append):
    """The answer is that of a session that has the room from the start; afterwards not a byte of the memory differs."""
    given = {"policy": policy, "append": append}
    with (
        watched(model, 21, **given) as session,
        watched(model, 21, **given, text_budget=TextBudget(0, 1500, 148)) as roomy,
    ):
        assert session.ask(NOW).text == roomy.ask(NOW).text
        parts, *rest = held(session)
        asked = {"max_tokens": 6, "temperature": 1.0, "seed": 1, "logprobs": 5}
        answers = [each.ask(LONG, **asked) for each in (session, roomy)]
        assert answers[0].wait()
        assert answers[1].wait()
        assert answers[0].prompt_tokens > 1000
        assert answers[0].token_ids == answers[1].token_ids
        mine, theirs = ([value for noted in each.logprobs for _, value in noted.likeliest] for each in answers)
        np.testing.assert_allclose(mine, theirs, atol=0.02)
        again, *rest_again = held(session)
        assert rest_again == rest
        assert all(np.array_equal(before, after) for before, after in zip(parts, again, strict=True))
        assert session.stats.cache_bytes < roomy.stats.cache_bytes


def test_positions_are_made_dense_for_a_question_that_needs_them(model):
    with watched(model, 75, append="all") as session:
        positions, append, most = session._stream.positions, session._stream.append_text, []
        assert positions.next + 1400 > positions.limit
        session._stream.append_text = lambda rows: (append(rows), most.append(positions.next))[0]
        answer, mark = session.ask(NOW).text, positions.mark()
        session.ask(LONG, max_tokens=2).wait()
        assert 1400 < most[-1] <= positions.limit
        assert (positions.mark(), session.ask(NOW).text) == (mark, answer)


def test_what_has_no_room_is_refused_and_named(model):
    with watched(model, 3) as session:
        most = session.max_question_tokens
        with pytest.raises(UserError, match=f"only {most} fit"):
            session.ask(LONG * 10)
        fits = session.most_pictures(NOW)
        frame = next(iter(open_source("demo"))).image
        assert session.ask(NOW, pictures=[frame] * fits).text
        with pytest.raises(UserError, match=f"only {fits} pictures"):
            session.ask(NOW, pictures=[frame] * (fits + 1))
        turns = [(NOW, "2 " * 1000)] * 300 + [(NOW, "2")] * 300
        answer = session.ask(NOW, history=turns, max_tokens=1)
        assert answer.wait()
        assert 300 < answer.dropped_turns < 600
        assert most - 20 < answer.prompt_tokens <= most
    with Session.open(model, max_question_tokens=300) as small:
        assert small.max_question_tokens == 300


def test_frames_come_in_while_a_long_question_is_read(model):
    """Of the session that is asked up to its chunk, and of another camera; none waits for the question's end."""
    with watched(model, 16) as session, watched(model, 16) as other:
        stream, score, image = session._stream, session._stream.score_text, next(iter(open_source("demo"))).image
        threads, waited = [], []

        def watch(camera):
            threads.append(threading.Thread(target=camera.watch, args=(image,)))
            threads[-1].start()

        def read(embeds, rows):
            """Two frames come with the first piece; when the next one is read they have been taken in."""
            if threads:
                for thread in threads:
                    thread.join(WAIT_S)
                waited.append([thread.is_alive() for thread in threads])
            else:
                for camera in (session, other):
                    watch(camera)
                while model.scheduler.waiting < 2:
                    pass
            return score(embeds, rows)

        stream.score_text = read
        answer = session.ask(LONG, max_tokens=1)
        assert answer.wait()
        assert waited[0] == [False, False]
        assert (session.stats.frames, other.stats.frames, session.waiting) == (17, 17, 1)
        assert answer.time_s < session.time_s
