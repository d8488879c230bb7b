"""What the caller of a session did wrong is one line of UserError, and the session goes on."""

import numpy as np
import pytest
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session, TextBudget

QUESTION, TEXT_BUDGET = "what color was the square?", TextBudget(16, 64, 8)


def opened(model, **settings):
    settings = {"budget": 4 * model.bundle.vision.tokens_per_frame, "chunk": 2, "text_budget": TEXT_BUDGET} | settings
    return Session.open(model, **settings)


def test_a_closed_session_says_so(model):
    session = Session.open(model.bundle.path, budget=4 * model.bundle.vision.tokens_per_frame)
    image = next(frames(1, model))
    session.watch(image)
    session.close()
    for use in (lambda: session.ask(QUESTION), lambda: session.watch(image), session.flush):
        with pytest.raises(UserError, match="the session is closed"):
            use()
    session.close()
    assert session.stats.frames == 1


def test_a_model_that_opening_loaded_is_closed_when_opening_fails(model, monkeypatch):
    closed, path = [], model.bundle.path
    monkeypatch.setattr(Model, "close", lambda self: closed.append(self))
    with pytest.raises(UserError, match="less than one frame"):
        Session.open(path, budget=1)
    assert len(closed) == 1
    with pytest.raises(UserError, match="less than one frame"):
        Session.open(model, budget=1)
    assert len(closed) == 1, "one that was given stays open"
    monkeypatch.setattr(Model, "load", lambda *_: pytest.fail("nothing is loaded for a policy that there is not"))
    with pytest.raises(UserError, match="did you mean"):
        Session.open(path, policy="infinipot")


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), 10**400, "3", True])
def test_a_time_that_is_none_takes_nothing_in(model, timestamp):
    with opened(model) as session:
        image = next(frames(1, model))
        for use in (lambda: session.watch(image, timestamp), lambda: session.skip(timestamp)):
            with pytest.raises(UserError, match="timestamp is a number of seconds, not"):
                use()
        assert session.stats.frames == 0
        session.watch(image)
        assert session.ask(QUESTION).time_s == 0.0, "the first frame, whose time is its number"


@pytest.mark.parametrize(
    ("shape", "says"),
    [((30_000, 30_000, 3), "30000x30000 is too large; 67,108,864 pixels"), ((0, 5, 3), r"not uint8 \[0, 5, 3\]")],
)
def test_a_frame_of_too_many_pixels_or_none_takes_nothing_in(model, shape, says):
    with opened(model) as session:
        with pytest.raises(UserError, match=says):
            session.watch(np.broadcast_to(np.uint8(3), shape))
        assert session.stats.frames == 0


@pytest.mark.parametrize("policy", ["infinipot-v", "sliding-window"])
@pytest.mark.parametrize("budget", [-5, 0, 1])
def test_a_budget_of_less_than_a_frame_is_refused(model, policy, budget):
    with pytest.raises(UserError, match=f"a budget of {budget} tokens is less than .*; give a larger --budget"):
        opened(model, policy=policy, budget=budget)


def test_what_cannot_be_asked(model):
    with opened(model) as session:
        for image in frames(2, model):
            session.watch(image, timestamp=3)
        for settings, says in [
            ({"temperature": float("nan")}, "temperature"),
            ({"max_tokens": 0}, "1 to 8 tokens"),
            ({"max_tokens": 2.5}, "max_tokens is an integer, not 2.5"),
            ({"seed": 1.5}, "seed is an integer, not 1.5"),
        ]:
            with pytest.raises(UserError, match=says):
                session.ask(QUESTION, **settings)
        with pytest.raises(UserError, match=r"'\\udce9', which is not valid Unicode"):
            session.ask("caf\udce9")
        with pytest.raises(UserError, match="a question is text, not int"):
            session.ask(3)
        with pytest.raises(UserError, match=r"a frame is a numpy array.*not list"):
            session.watch([[[0, 0, 0]]])
        greedy = session.ask(QUESTION, "one", max_tokens=4)
        assert greedy.text == session.ask(QUESTION, temperature=1e-320, max_tokens=4).text
        assert greedy.time_s == 3
        assert list(session._memory.conversations.turns) == ["one"]
