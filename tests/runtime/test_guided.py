"""snapkv-guided, the one policy under which a question changes the memory: what each question leaves for the next."""

import numpy as np
import pytest
from memory import arena
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.session import Session, TextBudget

FIRST, SECOND = "what color was the square?", "how many circle are there now"
TEXT_BUDGET = TextBudget(16, 64, 8)
POLICY = "snapkv-guided:target=0.3,window=6"


def held(stream):
    """The vision tokens of each layer and head, as sets of seq; nothing else but the prefix is there."""
    cache = stream.cache
    for layer in range(cache.layers):
        assert (np.isin(cache.kind(layer), (Kind.PREFIX, Kind.VISION))).all()
        assert (np.sort(cache.seq(layer), 1)[:, : stream.prefix] == np.arange(stream.prefix)).all()
    return [set(head.tolist()) for layer in range(cache.layers) for head in cache.seq(layer)]


def watched(model, count, capacity, policy=POLICY, chunk=3):
    session = Session.open(
        model, policy=policy, budget=capacity * model.bundle.vision.tokens_per_frame, chunk=chunk, text_budget=TEXT_BUDGET
    )
    watch(session, frames(count, model))
    session.flush()
    return session


def watch(session, images):
    for image in images:
        session.watch(image)


def test_until_a_question_comes_it_is_full(model):
    with watched(model, 20, 24) as guided, watched(model, 20, 24, "full") as full:
        assert arena(guided._stream) == arena(full._stream)
        assert guided.stats.memory.reindexings == 0


def test_a_question_compresses_to_its_target_and_the_next_sees_what_it_left(model):
    per_frame = model.bundle.vision.tokens_per_frame
    with watched(model, 20, 24) as session:
        stream, target = session._stream, int(0.3 * 24 * per_frame)
        before, position = held(stream), stream.positions.next
        session.ask(FIRST, max_tokens=5).wait()
        after = held(stream)
        assert all(len(rows) == stream.prefix + target and rows < seen for rows, seen in zip(after, before, strict=True))
        assert len({frozenset(rows) for rows in after}) > 1, "each head keeps its own"
        assert (stream.positions.next, session.stats.memory.compressions) == (position, 1)
        left = arena(stream)
        session.ask(SECOND, max_tokens=5).wait()
        assert arena(stream) == left, "no more than |C| are held, so nothing goes"
        watch(session, frames(9, model, seed=1))
        newcomers = set(range(stream._seq - 9 * per_frame, stream._seq))
        assert held(stream) == [rows | newcomers for rows in after]
        session.ask(SECOND, max_tokens=5).wait()
        last = held(stream)
        assert all(len(rows) == stream.prefix + target for rows in last)
        assert all(rows < old | newcomers for rows, old in zip(last, after, strict=True))


def test_a_stream_longer_than_its_capacity_goes_on_as_long_as_questions_come(model):
    """The capacity is a cap, the positions stay below the limit, and without a question the stream ends."""
    per_frame = model.bundle.vision.tokens_per_frame
    with watched(model, 0, 12) as session:
        stream, highest = session._stream, 0
        stream.positions.limit = stream.prefix + 12 * per_frame + stream.positions.text_rows
        for index, image in enumerate(frames(90, model)):
            session.watch(image)
            highest = max(highest, stream.positions.next)
            if index % 6 == 5:
                session.ask(FIRST, max_tokens=3).wait()
        assert stream.frames == 90
        assert session.stats.memory.compressions == 15
        assert session.stats.memory.reindexings > 2
        assert highest + stream.positions.text_rows <= stream.positions.limit
        with pytest.raises(UserError, match=r"the snapkv-guided cache is full: \d+ tokens hold 12 frames"):
            watch(session, frames(15, model))
