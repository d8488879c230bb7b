"""A source of frames, and what every kind of it has in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Scene(Protocol):
    """The truth about a made-up world at one frame."""

    def truth(self, question: str) -> str | None:
        """The right answer, or None where there is not exactly one."""

    def sample(self, random: np.random.Generator) -> list[str]:
        """Questions that have an answer at this frame: one about now and one about before, where there are any."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One sampled frame: uint8 RGB ``[H, W, 3]`` and its time in the stream, seconds.

    ``scene`` knows what there is to know after this frame, where the source does (the demo world does).
    """

    image: NDArray[np.uint8]
    time_s: float
    scene: Scene | None = None


class State(str, Enum):
    INITIALISING = "initialising"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"


class Source(ABC):
    """Frames sampled at a rate by their own timestamps.

    A live source goes on whether it is read or not, and says by what rule it drops frames; any other waits for its reader.
    """

    name: str
    live: bool = False
    rule: str = "block"  # what happens to frames while the reader is busy: block, or drop-oldest
    state: State = State.INITIALISING
    dropped: int = 0

    @abstractmethod
    def read(self) -> Frame | None:
        """The next sampled frame; None at the end. Raises SourceError when the source cannot go on."""

    def close(self) -> None:
        """Let go of what is open; a source that failed stays FAILED."""
        if self.state is not State.FAILED:
            self.state = State.ENDED

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self.read()) is not None:
            yield frame


class Sampler:
    """Picks frames by their timestamps: at most ``fps`` a second, the first one always. ``fps`` None takes every frame."""

    def __init__(self, fps: float | None) -> None:
        self._step = 0.0 if fps is None else 1 / fps
        self._start: float | None = None
        self._next = 0

    def wants(self, time_s: float) -> bool:
        if self._start is None:
            self._start = time_s
        if not self._step:
            return True
        elapsed = (time_s - self._start) / self._step
        if elapsed < self._next - 1e-6:
            return False
        self._next = int(elapsed + 1e-6) + 1
        return True


def mask_credentials(text: str) -> str:
    """Replace the user and password of any URL in ``text``, and the value of key-like parameters, by ``***``."""
    text = re.sub(r"(\w+://)[^/\s]*@", r"\1***@", text)
    return re.sub(r"(?i)([?&](?:\w*(?:key|token|password|passwd|pwd|secret|auth)\w*)=)[^&\s]+", r"\1***", text)
