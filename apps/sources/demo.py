"""The demo camera, which shows the generated world that the demo model was trained on."""

from __future__ import annotations

from edgevlm.apps.sources.base import Frame, FrameSampler, Source, StageTimer, State
from edgevlm.calib.demo.questions import WORLD_FPS, DemoScene
from edgevlm.calib.demo.world import World


class DemoSource(Source):
    """An endless source. Each frame's ``scene`` has the correct answer to every question that the demo model can answer."""

    name = "demo"

    def __init__(self, fps: float | None, seed: int = 0) -> None:
        self._world, self._sampler = World(seed), FrameSampler(fps)

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
