"""A question never changes the memory: wherever in a chunk it comes, the stream continues as if it had not been asked."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from memory import rows_of
from pictures import frames

from edgevlm.apps.sources.demo import DemoSource
from edgevlm.errors import UserError
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.session import Session, TextBudget

CHUNK, FRAMES = 5, 30
TINY = {"resv": "resv:index=0.25", "mosaic": "mosaic:index=0.25"}  # with an index of a few clusters even here
NAMES = [TINY.get(name, name) for name in sorted(POLICIES)]


def watched(model, policy, ask_at):
    """The memory after FRAMES frames with questions after those of ``ask_at``, what the stream counted, and the answers."""
    per_frame = model.bundle.vision.tokens_per_frame
    budget = FRAMES * per_frame if policy == "full" else 9 * per_frame + 3
    answers = []
    with Session.open(
        model, append="all", policy=policy, budget=budget, chunk=CHUNK, text_budget=TextBudget(16, 64, 8, pictures=2)
    ) as session:
        stream = session._stream
        for index, image in enumerate(frames(FRAMES, model)):
            session.watch(image)
            if index in ask_at:
                shown = [image[::-1], image[:, ::-1]][: index % 3]
                answers.append(session.ask("what color was it?", max_tokens=2, pictures=shown))
                assert answers[-1].wait(60)
        counted = stream.stats.compressions, stream.stats.evicted, stream.stats.reindexings, session.stats.chunks
        places = stream.positions.next, stream._seq, stream.frames, session.stats.policy_bytes
        return rows_of(stream), (*counted, *places), answers


@pytest.mark.parametrize("append", ["all", "changed"])
def test_a_picture_is_seen_by_its_question_alone(append):
    worlds = [DemoSource(2.0, seed) for seed in range(6)]
    *shown, watched = [[world.read() for _ in range(10)] for world in worlds[::-1]]
    now, budget = "how many objects are there now?", TextBudget(16, 64, 8, pictures=1)
    with Session.open("demo", append=append, text_budget=budget) as session:
        for frame in watched:
            session.watch(frame.image, frame.time_s)
        for *_, other in shown:
            answer = session.ask(now, pictures=[other.image])
            assert answer.text.strip() == other.scene.truth(now)
            assert answer.evidence is None, "a picture is no frame of the stream"
            assert answer.prompt_tokens > session.model.bundle.vision.tokens_per_frame
            assert session.ask(now).text.strip() == watched[-1].scene.truth(now)
        with pytest.raises(UserError, match="only 1 pictures fit with this question, not 2"):
            session.ask(now, pictures=[other.image] * 2)
        with pytest.raises(UserError, match="frame"):
            session.ask(now, pictures=[other.image[0]])


@pytest.mark.parametrize("policy", NAMES)
def test_in_the_middle_of_a_chunk(model, policy):
    (known, content), counted, _ = watched(model, policy, ())
    (known_too, content_too), counted_too, answers = watched(model, policy, (6, 12, 13, 18, 21))
    assert counted == counted_too
    assert (counted[0] > 3) == (policy != "full")
    for mine, theirs in zip(known, known_too, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(content, content_too, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)  # the vision tower may round batches of other sizes otherwise
    assert [answer.time_s for answer in answers] == [6, 12, 13, 18, 21]


def test_it_sees_the_frames_of_the_chunk_in_progress(model):
    """Two frames into a chunk the decoder has them before each question and forgets them after it; they are encoded once."""
    per_frame = model.bundle.vision.tokens_per_frame
    text = TextBudget(16, 64, 8)
    with Session.open(model, append="all", encode="all", budget=12 * per_frame, chunk=CHUNK, text_budget=text) as session:
        stream, encoded, seen = session._stream, [], []
        step, encode = stream.decoder.step, model.engine.encode
        for image in frames(CHUNK + 2, model):
            session.watch(image)
        held = stream.cache.lengths.copy()
        stream.decoder.step = lambda *of, **how: (seen.append((len(of[0]), int(of[3].max()))), step(*of, **how))[1]
        session._chunk._engine = SimpleNamespace(encode=lambda pixels: (encoded.append(len(pixels)), encode(pixels))[1])
        for _ in range(2):
            session.ask("what color was it?", max_tokens=1).wait()
            assert (stream.cache.lengths == held).all()
        shown, question = seen[:2]
        assert seen[2:] == [shown, question]
        assert shown == (2 * per_frame, held.max())
        assert question[1] == held.max() + 2 * per_frame
        session.flush()
        assert (stream.cache.lengths == held + 2 * per_frame).all()
        assert sum(encoded) == 2


def test_an_answer_is_freed_when_nobody_holds_it():
    """And with it the keys that its evidence would be read from; not when Python next looks for cycles."""
    with Session.open("demo", policy="hybrid", budget=512) as session:
        for frame in (DemoSource(2.0).read() for _ in range(8)):
            session.watch(frame.image, frame.time_s)
        gc.disable()
        try:
            answers = []
            for _ in range(2):
                answers.append(session.ask("how many objects are there now?"))
                assert answers[-1].evidence
            session.flush()  # the model's thread is through with both
            first = weakref.ref(answers[0])
            del answers
            assert first() is None
        finally:
            gc.enable()
