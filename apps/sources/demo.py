"""The demo camera: the procedural world that the embedded model was taught."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgevlm.apps.sources.base import Fact, Frame, FrameSampler, Source, StageTimer, State
from edgevlm.calib.demo.questions import ask, is_about_now, parse, sample, truth
from edgevlm.calib.demo.world import History, World

WORLD_FPS = 2.0  # the world moves on this often, and that is the rate the model was taught


@dataclass(frozen=True, slots=True)
class DemoScene:
    """What the demo world showed up to one frame."""

    history: History

    def truth(self, question: str) -> str | None:
        known = parse(question)
        return truth(known, self.history) if known else None

    def sample(self, random: np.random.Generator) -> list[str]:
        asked = sample(self.history, random)
        groups = [[text for kind, text, _ in asked if is_about_now(kind) is now] for now in (True, False)]
        return [str(random.choice(group)) for group in groups if group]

    def departed(self) -> list[Fact]:
        questions = [(thing, ask("past_where", 0, thing.color, thing.shape)) for thing in self.history.gone]
        known = [(thing, question.text, truth(question, self.history)) for thing, question in questions]
        facts = [Fact(thing.name, text, answer, ((thing.left or 0) + 1) / WORLD_FPS) for thing, text, answer in known if answer]
        return sorted(facts, key=lambda fact: -fact.left_s)


class DemoSource(Source):
    """Endless; each frame tells the truth about every question the demo model was taught."""

    name = "demo"

    def __init__(self, fps: float | None, seed: int = 0) -> None:
        self._world = World(seed)
        self._sampler = FrameSampler(fps)

    def read(self) -> Frame | None:
        while self.state is not State.ENDED:
            self.state = State.RUNNING
            timer = StageTimer()
            image = self._world.step()
            timer.captured()
            time_s = (self._world.history.now + 1) / WORLD_FPS
            if self._sampler.wants(time_s):
                return Frame(image, time_s, DemoScene(self._world.history.snapshot()), timer=timer)
        return None
