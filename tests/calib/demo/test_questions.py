"""Questions: every phrasing parses back, and truths equal those found by looking through every frame."""

import itertools

import numpy as np
import pytest

from edgevlm.calib.demo.questions import ANSWERS, is_about_now, sample, truth
from edgevlm.calib.demo.world import QUADRANTS, WINDOW, World
from edgevlm.runtime.taught import COLORS, KINDS, OFFERED, SHAPES, Question, ask, parse


def every_question():
    for kind, rule in KINDS.items():
        colors = range(len(COLORS)) if rule.has("<color>") else [None]
        shapes = range(len(SHAPES)) if rule.has("<shape>") else [None]
        for phrasing, color, shape in itertools.product(range(len(rule.phrasings)), colors, shapes):
            yield ask(kind, phrasing, color, shape)


def test_every_phrasing_parses_back():
    texts = set()
    for question in every_question():
        assert parse(question.text) == (question if question.kind in OFFERED else None)
        assert parse(f"  {question.text.upper().rstrip('?')} ") == question
        assert "<" not in question.text
        texts.add(question.text)
    assert len(texts) == sum(q.kind in OFFERED for q in every_question()), "one text for two questions"


@pytest.mark.parametrize("text", ["", "?", "what is the meaning of life?", "what color was the cube?", "what colour", "square"])
def test_what_was_never_taught(text):
    assert parse(text) is None


class Witness:
    """Looks at every frame and remembers all: frame -> {(colour, shape): quadrant}. No History is used."""

    def __init__(self, world: World, frames: int):
        self.frames = []
        for _ in range(frames):
            world.step()
            self.frames.append({(t.color, t.shape): t.quadrant for t in world.history.things if t.left is None})

    def answers(self, question: Question) -> set[str]:
        """All answers that what was shown allows; `truth` must give one exactly when there is one."""
        now, kind = self.frames[-1], question.kind
        order = list(dict.fromkeys(pair for frame in self.frames for pair in sorted(frame)))
        everywhere = {pair: quadrant for frame in self.frames for pair, quadrant in frame.items()}
        shown = now if is_about_now(kind) else everywhere
        fits = [p for p in shown if question.color in (None, p[0]) and question.shape in (None, p[1])]
        names = [f"{COLORS[c]} {SHAPES[s]}" for c, s in order]
        if kind == "now_count":
            return {str(len(now))}
        if kind == "count_color":
            return {str(len(fits))} if len(fits) < 4 else set()
        if kind.endswith("_seen"):
            return {"yes" if fits else "no"}
        if kind.endswith("_where"):
            return {QUADRANTS[shown[pair]] for pair in fits}
        if kind in ("now_color", "past_color"):
            return {COLORS[c] for c, _ in fits} if len(fits) == 1 else set()
        if kind in ("now_shape", "past_shape"):
            return {SHAPES[s] for _, s in fits} if len(fits) == 1 else set()
        if kind == "first_color":
            return {COLORS[c] for c, _ in order[:1]}
        if kind == "first_shape":
            return {SHAPES[s] for _, s in order[:1]}
        if kind == "before":
            return {names[order.index(pair) - 1] for pair in fits if order.index(pair) > 0}
        gone = {pair: max(t for t, frame in enumerate(self.frames) if pair in frame) for pair in order if pair not in now}
        return {names[order.index(pair)] for pair in gone if gone[pair] == max(gone.values())}


@pytest.mark.parametrize("seed", range(8))
def test_truth_is_what_the_frames_show(seed):
    world = World(seed, event_rate=(1 / 6, 0.5)[seed % 2])
    witness = Witness(world, (1, 8, 64, WINDOW)[seed % 4])
    for question in every_question():
        expected = witness.answers(question)
        assert truth(question, world.history) == (expected.pop() if len(expected) == 1 else None), question


def test_sample_gives_text_and_truth():
    kinds = set()
    for seed in range(10):
        world = World(seed)
        Witness(world, 64)
        for kind, text, answer in sample(world.history, np.random.default_rng(seed)):
            assert parse(text).kind == kind
            assert truth(parse(text), world.history) == answer
            assert answer in ANSWERS or all(word in ANSWERS for word in answer.split())
            kinds.add(kind)
    assert kinds == set(OFFERED)


def test_an_endless_stream_forgets_and_says_so():
    world = World(1)
    Witness(world, 2000)
    history = world.history
    forgotten = history.shown - {(t.color, t.shape) for t in history.things}
    color, shape = sorted(forgotten)[0]
    assert truth(ask("past_seen", 0, color, shape), history) is None
    assert truth(ask("count_color", 0, color), history) is None
    assert truth(ask("first_shape", 0), history) == SHAPES[history.first.shape]
    assert truth(ask("before", 0, history.things[0].color, history.things[0].shape), history) is None or (
        history.things[0].number > 0
    )
