"""The truth about the demo world at one frame."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgevlm.calib.demo.questions import ask, is_about_now, parse, sample, truth
from edgevlm.calib.demo.world import History

WORLD_FPS = 2.0  # the world moves on this often, and that is the rate the model was taught


@dataclass(frozen=True, slots=True)
class Fact:
    """A question about an object that has left the world, its answer, and when the object left, seconds."""

    name: str
    question: str
    truth: str
    left_s: float


@dataclass(frozen=True, slots=True)
class DemoScene:
    """What the demo world showed up to one frame."""

    history: History

    def truth(self, question: str) -> str | None:
        """Return the right answer, None where there is not exactly one."""
        known = parse(question)
        return truth(known, self.history) if known else None

    def sample(self, random: np.random.Generator) -> list[str]:
        """Draw questions that have an answer at this frame: one about now and one about before, if there are any."""
        asked = sample(self.history, random)
        groups = [[text for kind, text, _ in asked if is_about_now(kind) is now] for now in (True, False)]
        return [str(random.choice(group)) for group in groups if group]

    def departed(self) -> list[Fact]:
        """Return where each object was that has left, the latest first."""
        questions = [(thing, ask("past_where", 0, thing.color, thing.shape)) for thing in self.history.gone]
        known = [(thing, question.text, truth(question, self.history)) for thing, question in questions]
        facts = [Fact(thing.name, text, answer, ((thing.left or 0) + 1) / WORLD_FPS) for thing, text, answer in known if answer]
        return sorted(facts, key=lambda fact: -fact.left_s)
