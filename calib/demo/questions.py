"""Find the right answers to the questions that the demo model was taught.

A question is about the present (the newest frame) or the past (the whole stream, or the part that History still holds). A
question has an answer only if exactly one answer is right: if two squares were shown, "the square" is ambiguous.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgevlm.runtime.taught import COLOR, COLORS, COUNTS, KINDS, OFFERED, SHAPE, SHAPES, Question, ask, parse

from .world import QUADRANTS, History, Thing

ANSWERS = (*COLORS, *SHAPES, *QUADRANTS, *COUNTS, "yes", "no")
WORLD_FPS = 2.0  # the world's frames per second, at which the model was trained


def truth(question: Question, history: History) -> str | None:
    """Return the right answer after the newest frame, or None unless exactly one answer is right."""
    kind, thing = question.kind, subject(question, history)
    if kind == "now_count":
        return COUNTS[len(history.present)]
    if kind == "count_color":
        count = len(_matching(history.things, question))
        return COUNTS[count] if history.complete and count < len(COUNTS) else None
    if kind == "now_seen":
        return "yes" if thing else "no"
    if kind == "past_seen":  # None if the pair was shown and then forgotten
        return "yes" if thing else None if (question.color, question.shape) in history.shown else "no"
    if thing is None:
        return None
    if kind == "left_last":
        return thing.name
    if kind == "before":  # the object that entered just before ``thing``
        return next((other.name for other in history.things if other.number == thing.number - 1), None)
    asked = {"color": COLORS[thing.color], "shape": SHAPES[thing.shape], "where": QUADRANTS[thing.quadrant]}
    return asked[kind.partition("_")[2]]


def subject(question: Question, history: History) -> Thing | None:
    """Return the object whose patches show the answer, or None. For a question about the past, this is the one asked about."""
    if question.kind == "left_last":
        return max(history.gone, key=lambda thing: thing.left or 0, default=None)
    if question.kind.startswith("first_"):
        return history.first
    if question.color is None and question.shape is None:
        return None
    found = _matching(history.present if is_about_now(question.kind) else history.things, question)
    return found[0] if len(found) == 1 else None


def _matching(things: list[Thing], question: Question) -> list[Thing]:
    return [thing for thing in things if question.color in (None, thing.color) and question.shape in (None, thing.shape)]


def is_about_now(kind: str) -> bool:
    return kind.startswith("now_")


def sample(history: History, rng: np.random.Generator) -> list[tuple[str, str, str]]:
    """Draw a question of each kind that has an answer after the newest frame. Each question is (kind, text, answer)."""
    asked = ((kind, draw(kind, history, rng)) for kind in OFFERED)
    return [(kind, question.text, answer) for kind, pair in asked if pair for question, answer in [pair]]


def draw(kind: str, history: History, rng: np.random.Generator) -> tuple[Question, str] | None:
    """Return a random question of this kind and its answer, or None if no such question has an answer.

    ``past_*`` questions are about objects that have left.
    """
    phrasing = int(rng.integers(len(KINDS[kind].phrasings)))
    fillings = list(_fillings(kind, history, rng))
    for place in rng.permutation(len(fillings)):
        question = ask(kind, phrasing, *fillings[place])
        answer = truth(question, history)
        if answer is not None:
            return question, answer
    return None


def _fillings(kind: str, history: History, rng: np.random.Generator) -> Iterator[tuple[int | None, int | None]]:
    has_color, has_shape = KINDS[kind].has(COLOR), KINDS[kind].has(SHAPE)
    if kind in ("now_seen", "past_seen"):  # half of the answers are "no"; half of those pairs are near misses
        luck = rng.random()
        pool = history.present if kind == "now_seen" and luck < 0.5 else history.gone
        if pool and luck < (0.75 if kind == "now_seen" else 0.5):
            thing = pool[int(rng.integers(len(pool)))]
            yield thing.color, thing.shape
        else:
            yield from _absent(history, rng)
    elif kind == "count_color":
        for color in sorted({thing.color for thing in history.things}) if rng.random() < 0.8 else range(len(COLORS)):
            yield color, None
    elif not has_color and not has_shape:
        yield None, None
    else:
        for thing in history.present if is_about_now(kind) else history.things if kind == "before" else history.gone:
            yield (thing.color if has_color else None), (thing.shape if has_shape else None)


def _absent(history: History, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Yield a colour and a shape never shown together. Half of the time, both were shown, but on different objects."""
    things = history.things
    if things and rng.random() < 0.5:
        pairs = {(a.color, b.shape) for a in things for b in things} - history.shown
    else:
        pairs = {(c, s) for c in range(len(COLORS)) for s in range(len(SHAPES))} - history.shown
    if pairs:
        yield sorted(pairs)[int(rng.integers(len(pairs)))]


@dataclass(frozen=True, slots=True)
class Fact:
    """A question about an object that left, and its answer. ``left_s``: when the object left, in seconds."""

    name: str
    question: str
    truth: str
    left_s: float


@dataclass(frozen=True, slots=True)
class DemoScene:
    """The demo world's history up to one frame."""

    history: History

    def truth(self, question: str) -> str | None:
        """Return the right answer to a question, or None unless exactly one answer is right."""
        known = parse(question)
        return truth(known, self.history) if known else None

    def sample(self, random: np.random.Generator) -> list[str]:
        """Draw one question about the present and one about the past, if such questions have an answer at this frame."""
        asked = sample(self.history, random)
        groups = [[text for kind, text, _ in asked if is_about_now(kind) is now] for now in (True, False)]
        return [str(random.choice(group)) for group in groups if group]

    def departed(self) -> list[Fact]:
        """Return a question about where each departed object was, starting with the last to leave."""
        questions = [(thing, ask("past_where", 0, thing.color, thing.shape)) for thing in self.history.gone]
        known = [(thing, question.text, truth(question, self.history)) for thing, question in questions]
        facts = [Fact(thing.name, text, answer, ((thing.left or 0) + 1) / WORLD_FPS) for thing, text, answer in known if answer]
        return sorted(facts, key=lambda fact: -fact.left_s)
