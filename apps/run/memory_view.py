"""What a session's memory holds, frame by frame, for the terminal to show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.run.thumbnails import Thumbnails
from edgevlm.apps.sources import Frame
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.session import Session

GROUPS = 4  # of layers, shown separately
EVERY_S = 0.5  # from one look to the next
LOOK_S = 0.01  # of its session's turns that a look takes: next to none of its frames
IN_MEMORY = 4 << 20  # bytes of pictures that are kept there, unless told where else
FORGOTTEN = 16  # frames that were just forgotten and are shown


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What a session holds. ``frames``: those still in memory, in order; the first of a group of frames.

    ``patches``: ``[frames, groups, tokens]``, the fraction of a layer group's heads and layers that hold each token, 0 to 1.
    ``groups``: the first and the last layer of each. ``waiting``: frames of an unfinished chunk.
    """

    policy: str
    tokens: int
    budget: int
    watched: int
    frames: NDArray[np.int64]
    patches: NDArray[np.float32]
    groups: tuple[tuple[int, int], ...]
    waiting: int = 0

    @property
    def all_layers(self) -> NDArray[np.float64]:
        """Over all layers, ``[frames, tokens]``."""
        return np.average(self.patches, axis=1, weights=[1 + last - first for first, last in self.groups])

    @property
    def fractions(self) -> NDArray[np.float64]:
        """The fraction of each frame's tokens that is held, ``[frames]``."""
        return self.all_layers.mean(axis=1)


@dataclass(frozen=True, slots=True)
class StripView:
    """A memory, with the time, seconds, and number of frames that it holds and has just forgotten, oldest first."""

    memory: MemoryView
    held: tuple[tuple[float, int], ...]
    forgotten: tuple[tuple[float, int], ...]
    image: Callable[[int], NDArray[np.uint8] | None]  # of a frame


def view_memory(session: Session) -> MemoryView:
    """Look at a session, in its turn."""
    return session.model.scheduler.run(session, _view, session, period=LOOK_S)


def _view(session: Session) -> MemoryView:
    cache, vision, stats = session.cache, session.model.bundle.vision, session.stats
    tokens, columns = vision.tokens_per_frame, vision.grid[1]
    layers = [part for part in np.array_split(np.arange(cache.layers), GROUPS) if len(part)]
    found: list[tuple[int, NDArray[np.int32], NDArray[np.int64]]] = []  # group, frames and places of tokens
    for group, part in enumerate(layers):
        for layer in part.tolist():
            seen = cache.kind(layer) == Kind.VISION
            place = cache.row(layer)[seen].astype(np.int64) * columns + cache.col(layer)[seen]
            found.append((group, cache.frame(layer)[seen], place))
    frames = np.unique(np.concatenate([np.unique(each) for _, each, _ in found]))
    counts = np.zeros((len(frames), len(layers), tokens), np.float32)
    for group, of, place in found:
        every = np.bincount(np.searchsorted(frames, of) * tokens + place, minlength=len(frames) * tokens)
        counts[:, group] += every.reshape(-1, tokens)
    counts /= np.array([len(part) * cache.kv_heads for part in layers], np.float32)[:, None]
    ends = tuple((int(part[0]), int(part[-1])) for part in layers)
    firsts = frames.astype(np.int64) * vision.group
    return MemoryView(session.policy, stats.tokens, session.budget, stats.frames, firsts, counts, ends, session.waiting)


class MemoryWatch:
    """Keeps a thumbnail of each frame and which are held. :attr:`view` may be read by any thread.

    thumbnails: in memory unless given; closed with it. ``offset``: wall clock of the stream's time 0, seconds.
    """

    def __init__(self, session: Session, thumbnails: Thumbnails | None = None) -> None:
        self.session, self.thumbnails, self.offset = session, thumbnails or Thumbnails(cap=IN_MEMORY), 0.0
        self._memory: MemoryView | None = None
        self._due = 0.0
        self.thumbnails.begin(session.stats.frames)

    def watch(self, frame: Frame) -> None:
        """Remember a frame that the session has taken in."""
        self.offset = time.time() - frame.time_s
        newest = self.session.stats.frames - 1
        self.thumbnails.add(newest, frame.time_s, time.time(), frame.image)
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        self._memory = view_memory(self.session)
        group = self.session.model.bundle.vision.group
        held = {number + of for number in self._memory.frames.tolist() for of in range(group)}
        self.thumbnails.keep(held, newest - self.session.chunk)  # later ones may not have been appended yet

    @property
    def view(self) -> StripView | None:
        """None before the first frame."""
        if self._memory is None:
            return None
        taken = self.thumbnails.taken()
        held = tuple((each.time_s, number) for number, each in taken.items() if each.held)
        forgotten = tuple((each.time_s, number) for number, each in taken.items() if not each.held)
        return StripView(self._memory, held, forgotten[-FORGOTTEN:], self.thumbnails.image)

    def close(self) -> None:
        self.thumbnails.close()
