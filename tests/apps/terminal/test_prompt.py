"""Questions typed at the prompt: what the keyboard makes of keys and pastes, and which frame's truth an answer is given."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.sources import Frame, Source
from edgevlm.apps.terminal.keyboard import Keyboard
from edgevlm.apps.terminal.screen import Screen


@pytest.mark.parametrize(
    ("reads", "lines", "left"),
    [
        (["\x1b[200~who came in?\x1b[201~\r"], ["who came in?"], ""),
        (["\x1b[200~who left?\rwho came?\r\x1b[201~"], ["who left?", "who came?"], ""),
        (["a\x1b[Ab\x1bOPc\x1b[1;5Dd"], [], "abcd"),
        (["ab\x1b[", "3~c", "\x1b[20", "0~d"], [], "abcd"),
        (["\x1b", "why"], [], "why"),
        (["\x1bwhy\x7fo"], [], "who"),
    ],
)
def test_escape_sequences_take_nothing_with_them(reads, lines, left):
    typed = []
    keyboard = Keyboard(typed.append, lambda: None)
    for read in reads:
        keyboard.type(read)
    assert (typed, keyboard.text) == (lines, left)


class Numbered:
    def __init__(self, number):
        self.number = number

    def truth(self, question):
        return str(self.number)


class Three(Source):
    name = "three"

    def __init__(self):
        self.frames = iter(Frame(np.zeros((2, 2, 3), np.uint8), float(i), Numbered(i)) for i in range(1, 4))

    def read(self):
        return next(self.frames, None)


class Session:
    """Answers a question asked while frame 2 is taken in, as a session does: after that frame, from it."""

    def __init__(self, is_demo):
        self.model, self.time_s = SimpleNamespace(is_demo=is_demo), 0.0
        self.stats = SimpleNamespace(
            frames=3, tokens=0, cache_bytes=0, memory=SimpleNamespace(compressions=0, compress_ms=0.0), store=None
        )
        self.policy = "uniform"
        self.inside, self.asked, self.conversations = threading.Event(), threading.Event(), []

    def watch(self, image, time_s):
        if time_s == 2.0:
            self.inside.set()
            assert self.asked.wait(10)
        self.time_s = time_s

    def ask(self, question, *, conversation):
        self.conversations.append(conversation)
        self.asked.set()
        return Said()

    def check(self, question): ...
    def flush(self): ...
    def close(self): ...


class Said:
    time_s, text, token_ids, ttft_ms, tpot_ms = 2.0, "2", [1], 1.0, 0.0

    def __iter__(self):
        return iter(["2"])


class Output:
    def __init__(self):
        self.answers = []

    def answer(self, answered):
        self.answers.append(answered)

    def piece(self, text): ...
    def stats(self, stats): ...
    def summary(self, stats): ...
    def notice(self, text): ...


def test_the_truth_is_that_of_the_frame_answered_from():
    session, output = Session(is_demo=False), Output()
    run = RunLoop(session, Three(), output, RunPlan())

    def ask_meanwhile():
        session.inside.wait(10)
        assert run.frame.time_s == 1.0, "frame 2 is being taken in"
        run.ask("how many?")

    asker = threading.Thread(target=ask_meanwhile)
    asker.start()
    run()
    asker.join(10)
    assert [(answered.time_s, answered.truth) for answered in output.answers] == [(2.0, "2")]


@pytest.mark.parametrize(("is_demo", "conversation"), [(True, None), (False, "terminal")])
def test_the_demo_model_is_asked_without_earlier_turns(is_demo, conversation):
    given = []
    screen = Screen()
    run = SimpleNamespace(session=Session(is_demo), ask=lambda *arguments: given.append(arguments))
    screen._run = run
    for line in ("how many objects are there now?", None):
        screen._typed.put(line)
    screen._ask_typed()
    assert given == [("how many objects are there now?", conversation)]
