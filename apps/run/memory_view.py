"""What a session's memory holds, frame by frame, for the terminal to show."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources import Frame
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.session import Session

LAYERS = 4  # of a cache that are looked at, evenly spaced
EVERY_S = 0.5  # from one look to the next
THUMBNAIL = (48, 36)  # pixels of a frame that is remembered, width and height
THUMBNAILS = 256  # frames that are remembered, at most
FORGOTTEN = 16  # frames that were just forgotten and are shown

Thumbnail = tuple[float, NDArray[np.uint8]]  # its time in the stream, seconds, and pixels


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What a session holds. ``frames``: those of which it holds something; ``shares`` of their tokens, 0 to 1."""

    policy: str
    tokens: int
    budget: int
    watched: int
    frames: NDArray[np.int64]
    shares: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StripView:
    """A memory, with frames that it holds and that it has just forgotten, oldest first."""

    memory: MemoryView
    held: tuple[Thumbnail, ...]
    forgotten: tuple[Thumbnail, ...]


def view_memory(session: Session) -> MemoryView:
    """Look at a session, in its turn."""
    return session.model.scheduler.run(session, _view, session)


def _view(session: Session) -> MemoryView:
    held, stats = _held_patches(session), session.stats
    shares = np.array([patches.mean() for patches in held.values()])
    frames = np.fromiter(held, np.int64, len(held))
    return MemoryView(session.policy, stats.tokens, session.budget, stats.frames, frames, shares)


def held_patches(session: Session) -> dict[int, NDArray[np.float32]]:
    """Of each frame that is held, for each of its tokens, the share of layers and heads that hold it, ``[tokens]``, 0 to 1.

    Frames in order; of a group of frames, the first.
    """
    return session.model.scheduler.run(session, _held_patches, session)


def _held_patches(session: Session) -> dict[int, NDArray[np.float32]]:
    cache, vision = session.cache, session.model.bundle.vision
    layers = np.unique(np.linspace(0, cache.layers - 1, LAYERS).astype(int)).tolist()
    tokens, columns = vision.tokens_per_frame, vision.grid[1]
    keys: list[NDArray[np.int64]] = []
    for layer in layers:
        seen = cache.kind(layer) == Kind.VISION
        row, col = cache.row(layer)[seen].astype(np.int64), cache.col(layer)[seen].astype(np.int64)
        keys.append(cache.frame(layer)[seen].astype(np.int64) * tokens + row * columns + col)
    places, counts = np.unique(np.concatenate(keys), return_counts=True)
    held: dict[int, NDArray[np.float32]] = {}
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        shares = held.setdefault(place // tokens * vision.group, np.zeros(tokens, np.float32))
        shares[place % tokens] = count / (len(layers) * cache.kv_heads)
    return held


class MemoryWatch:
    """Keeps small copies of frames while the memory holds something of them. :attr:`view` may be read by any thread."""

    def __init__(self, session: Session) -> None:
        self.view: StripView | None = None
        self.reopen(session, None)

    def reopen(self, session: Session, budget: str | None) -> None:
        """Go on with another session, whose memory is empty."""
        self.session = session
        self._thumbnails: dict[int, Thumbnail] = {}
        self._forgotten: deque[Thumbnail] = deque(maxlen=FORGOTTEN)
        self._due = 0.0

    def watch(self, frame: Frame) -> None:
        """Remember a frame that the session has taken in."""
        width, height = THUMBNAIL
        rows = np.arange(height) * frame.image.shape[0] // height
        columns = np.arange(width) * frame.image.shape[1] // width
        self._thumbnails[self.session.stats.frames - 1] = frame.time_s, frame.image[rows][:, columns]
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        memory = view_memory(self.session)
        oldest = memory.watched - self.session.chunk  # later ones may not have been appended yet
        held = set(memory.frames.tolist())
        group = self.session.model.bundle.vision.group
        for number in [number for number in self._thumbnails if number < oldest and number // group * group not in held]:
            self._forgotten.append(self._thumbnails.pop(number))
        while len(self._thumbnails) > THUMBNAILS:
            numbers = list(self._thumbnails)
            for number in numbers[: len(numbers) // 2 : 2]:
                del self._thumbnails[number]
        self.view = StripView(memory, tuple(self._thumbnails.values()), tuple(self._forgotten))

    def close(self) -> None:
        """Nothing is open."""
