"""Questions about a window of time, against a decoder that has nothing but the rows of that time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from pictures import frames
from reference_decoder import HeadCache, ReferenceDecoder

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.time_window import NothingHeld

QUESTION = "what color was the square?"
STEP_S = 0.5  # between frames


def only(cache, layer, head, since, until):
    """The slots of the rows that a question about that time may see, one by one."""
    kind, frame, confirmed = (part(layer)[head] for part in (cache.kind, cache.frame, cache.confirmed))
    span = [(STEP_S * first, STEP_S * last) for first, last in zip(frame.tolist(), confirmed.tolist(), strict=True)]
    return [
        slot
        for slot, (first, last) in enumerate(span)
        if kind[slot] == Kind.PREFIX or (kind[slot] == Kind.VISION and first <= until and last >= since)
    ]


def reference_logits(checkpoint, session, since, until, end):
    """Of the answer's first token; ``end``: the position behind the question."""
    decoder, cache, model = ReferenceDecoder(checkpoint), session.cache, session.model
    for layer in range(cache.layers):
        for head in range(cache.kv_heads):
            slots = only(cache, layer, head, since, until)
            at = np.zeros(len(slots), np.int64)  # their keys are turned already
            key, value = (cache.dequantize(part, layer)[head, slots].astype(np.float64) for part in ("key", "value"))
            decoder.cache[layer][head] = HeadCache(key, value, at, at)
    ids = session._chat.suffix([], QUESTION)
    embeds = np.concatenate([model.closing, model.engine.embed(np.asarray(ids, np.int64))])
    return decoder.append(embeds, np.arange(end - len(embeds), end))[-1]


def asked_logits(session, ends=None, **window):
    """Of three tokens; ``ends`` takes the position behind the rows of each."""
    found = []

    def keep(ids, logits):
        found.append(logits.copy())
        if ends is not None:
            ends.append(session._stream.positions.next)
        return logits

    session.ask(QUESTION, max_tokens=3, logits_processor=keep, **window).wait()
    return found


@pytest.mark.parametrize("policy", ["full", "last-seen", "infinipot-v", "h2o"])
@pytest.mark.parametrize("append", ["all", "changed"])
def test_a_window_is_the_memory_without_all_other_rows(model, checkpoint, policy, append):
    """At random windows over what random policies keep; and the memory afterwards is the same, byte for byte."""
    per_frame, random = model.bundle.vision.tokens_per_frame, np.random.default_rng(1)
    budget = {"full": 40}.get(policy, 6) * per_frame
    uneven = 0
    with Session.open(model, policy=policy, budget=budget, chunk=2, append=append, text_budget=TextBudget(8, 64, 8)) as session:
        for image in frames(30, model):
            session.watch(image, STEP_S * session.stats.frames)
        session.flush()
        if session._stream.present:  # the newest frame is seen whole from beside the memory: leave it out
            session._stream.times.add(session._stream.times.newest, 1e6)
        cache, whole = session.cache, asked_logits(session)[0]
        before = [{name: part.copy() for name, part in cache.held(layer).items()} for layer in range(cache.layers)]
        for _ in range(6):
            since, until = sorted(random.uniform(0, STEP_S * 28, 2))
            counts = {(layer, head): len(only(cache, layer, head, since, until))
                      for layer in range(cache.layers) for head in range(cache.kv_heads)}  # fmt: skip
            uneven += any(counts[layer, head] != counts[layer, 0] for layer, head in counts)
            ends = []
            try:
                found = asked_logits(session, ends, since=since, until=until)
            except NothingHeld:
                assert set(counts.values()) == {session._stream.prefix}
                continue
            expected = reference_logits(checkpoint, session, since, until, ends[0])
            np.testing.assert_allclose(found[0], expected, atol=2e-3 * np.abs(expected).max(), rtol=0)
            assert len(found) == 3
            assert np.abs(found[0] - whole).max() > 1e-3
        for layer, held in enumerate(before):
            for name, part in held.items():
                np.testing.assert_array_equal(cache.held(layer)[name], part, err_msg=name)
        np.testing.assert_array_equal(asked_logits(session)[0], whole)
    if append == "all":  # what changed fits in the budget: nothing is evicted
        assert (uneven > 0) == (policy in ("infinipot-v", "h2o"))


def test_frames_not_in_the_memory_yet_are_of_their_time_too(model):
    """The chunk at hand, and under ``changed`` the newest frame."""
    per_frame = model.bundle.vision.tokens_per_frame
    images = list(frames(7, model))
    for append in ("all", "changed"):
        with Session.open(model, policy="full", budget=40 * per_frame, chunk=16, append=append) as session:
            for number, image in enumerate(images):
                session.watch(image, float(number))
            everything = asked_logits(session)
            for given, expected in zip(asked_logits(session, since=0.0), everything, strict=True):
                np.testing.assert_array_equal(given, expected)
            newest = session.ask(QUESTION, since=5.5)
            assert newest.text
            assert newest.evidence is not None
            assert {moment.frame for moment in newest.evidence.moments} == {6}
            with pytest.raises(NothingHeld, match=r"nothing from 6\.5 s to now of the stream; it reaches back to 0\.0 s"):
                print(session.ask(QUESTION, since=6.5))
            session.skip(8.0)  # the picture stands still: the newest frame is what there is to be seen
            assert session.ask(QUESTION, since=6.5).text == newest.text


def test_evidence_lies_in_the_window(model):
    """Also that of rows which were there before the window began and were confirmed in it."""
    still = next(frames(1, model))
    with Session.open(model, policy="last-seen", budget=600, append="changed") as session:
        for number in range(20):
            image = still.copy()
            image[:, : 4 * (number % 3)] = 10 * number
            session.watch(image, float(number))
        for since, until in ((4.0, 9.0), (10.0, math.inf)):
            evidence = session.ask(QUESTION, since=since, until=min(until, 1e9)).evidence
            assert evidence is not None
            assert evidence.moments
            for moment in evidence.moments:
                assert since <= moment.time_s <= moment.until_s <= until


def test_whether_it_is_held_is_said_of_the_whole_memory_alone(model):
    """The rule is calibrated on questions about all that was seen."""
    with Session.open(model, append="all", policy="last-seen", budget=4 * model.bundle.vision.tokens_per_frame) as session:
        heads = session._stream.evidence_heads
        session._stream.evidence_heads = replace(heads, weights=(0.0,) * (3 * len(heads.heads) + 3), bias=-1.0)
        for number, image in enumerate(frames(20, model)):
            session.watch(image, float(number))
        session.flush()
        assert session.ask(QUESTION).evidence.held is False
        assert session.ask(QUESTION, since=15.0).evidence.held is None


def test_what_chooses_by_the_question_refuses_a_window(model):
    with Session.open(model, policy="rekv", budget=20 * model.bundle.vision.tokens_per_frame) as session:
        session.watch(next(frames(1, model)), 0.0)
        with pytest.raises(UserError, match="ask without since and until"):
            session.ask(QUESTION, since=0.0)
        with pytest.raises(UserError, match="until 1 s is before since 2 s"):
            session.ask(QUESTION, since=2.0, until=1.0)
