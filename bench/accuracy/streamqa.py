"""The suites: streams of the demo world, one question of each kind after the last frame, and what shows the answer.

The background of ``streamqa-hard`` moves and is cut, and nearly twice as much happens.

A token is named by its place in the stream, ``frame * tokens_per_frame + patch``: the same number whatever a policy keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.world import World

DEVELOPMENT = 2_000_000
"""First word of the worlds' seeds in development, ``[DEVELOPMENT, seed, stream]``; training's begin with small numbers."""

TEST_SEEDS = (3_000_000, 7)
"""First words of the worlds' seeds of ``--seed test``. For reports only: nothing may be chosen or tuned by what they give."""

Words = tuple[int, int]

SUITES: dict[str, Callable[[list[int]], World]] = {
    "streamqa": World,
    "streamqa-hard": partial(World, hard=True),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its one right answer.

    evidence: rising tokens that show the answer, int64; empty where nothing shows it (a "no"). For a question about now they
    lie in the newest frame. last: the last frame that showed it, None without evidence.
    """

    kind: str
    text: str
    answer: str
    evidence: NDArray[np.int64]
    last: int | None

    @property
    def is_about_now(self) -> bool:
        return demo.is_about_now(self.kind)


@dataclass(frozen=True, slots=True)
class Exam:
    """One stream. frames: uint8 ``[T, H, W, 3]``; owners: int32 ``[T, p]``, the object in each patch, -1 for none."""

    frames: NDArray[np.uint8]
    owners: NDArray[np.int32]
    questions: list[Question]

    def quarter(self, question: Question) -> int | None:
        """In which quarter of the stream the evidence was last seen, 1 the oldest; None without evidence."""
        return None if question.last is None else 1 + question.last * 4 // len(self.frames)

    def gap(self, question: Question) -> int | None:
        """How many frames before the newest the evidence was last seen; None without evidence."""
        return None if question.last is None else len(self.frames) - 1 - question.last


def seed_words(text: str) -> Words:
    """``test`` or a number, as the first words of the worlds' seeds. Raises ValueError."""
    if text == "test":
        return TEST_SEEDS
    seed = int(text)
    if seed < 0:
        raise ValueError(text)
    return DEVELOPMENT, seed


def make_exam(words: Words, stream: int, frames: int, suite: str = "streamqa") -> Exam:
    """The ``stream``-th stream of a seed: always the same."""
    world, rng = SUITES[suite]([*words, stream]), np.random.default_rng([*words, stream, 1])
    shown, owners = [], []
    for _ in range(frames):
        shown.append(world.step())
        owners.append(world.owners)
    held = np.array(owners, np.int32)
    drawn = [pair for kind in demo.OFFERED if (pair := demo.draw(kind, world.history, rng))]
    return Exam(np.array(shown), held, [as_question(asked, answer, world, held) for asked, answer in drawn])


def as_question(asked: demo.Question, answer: str, world: World, owners: NDArray[np.int32]) -> Question:
    """With its evidence. owners: int32 ``[T, p]``, of the whole stream."""
    shows = np.isin(owners, carriers(asked, world))
    if demo.is_about_now(asked.kind):
        shows[:-1] = False
    evidence = np.flatnonzero(shows)
    last = int(evidence[-1]) // owners.shape[1] if len(evidence) else None
    return Question(asked.kind, asked.text, answer, evidence, last)


def carriers(asked: demo.Question, world: World) -> list[int]:
    """Numbers of the objects that show the answer: the question's subject, or all those that a count is about."""
    history = world.history
    thing = demo.subject(asked, history)
    if thing is not None:
        return [thing.number]
    among = history.present if demo.is_about_now(asked.kind) else history.things
    return [other.number for other in among if asked.color in (None, other.color) and asked.shape in (None, other.shape)]
