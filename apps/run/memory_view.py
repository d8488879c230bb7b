"""Show a session's memory frame by frame; in the demo, compare several policies on the same stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.run.thumbnails import Thumbnails
from edgevlm.apps.sources import Frame
from edgevlm.calib.demo.questions import Fact
from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.instant import Instant
from edgevlm.runtime.session import Session

GROUPS = 4
EVERY_S = 0.5
LOOK_S = 0.01  # the scheduler's period, in seconds, for a reading of the memory
FULL_BUDGET = "1920"
FACTS = 8  # number of departed objects that a comparison asks about


@dataclass(frozen=True, slots=True)
class MemoryView:
    """A session's memory.

    ``frames`` holds the numbers of the frames in memory, ascending. If frames are encoded together, only the first is listed.
    ``groups`` holds the first and last layer of each group of layers.
    ``patches``, ``[frames, groups, tokens]``, is the fraction of the KV heads in a group of layers that hold a token.
    ``waiting`` is the number of frames in the unfinished chunk.
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
        """Return the mean of ``patches`` over all layers, ``[frames, tokens]``."""
        return np.average(self.patches, axis=1, weights=[1 + last - first for first, last in self.groups])

    @property
    def fractions(self) -> NDArray[np.float64]:
        """Return the fraction of each frame's tokens that is in memory, ``[frames]``."""
        return self.all_layers.mean(axis=1)


def view_memory(session: Session) -> MemoryView:
    """Wait for the session's turn on the model, then read its memory."""
    return session.model.scheduler.run(session, _view, session, period=LOOK_S)


def _view(session: Session) -> MemoryView:
    cache, vision, stats = session.cache, session.model.bundle.vision, session.stats
    tokens, columns = vision.tokens_per_frame, vision.grid[1]
    layers = [part for part in np.array_split(np.arange(cache.layers), GROUPS) if len(part)]
    found: list[tuple[int, NDArray[np.int32], NDArray[np.int64]]] = []  # a layer's group, and its tokens' frames and patches
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
    """Keeps a thumbnail of each frame, and records which frames are in memory. :meth:`close` closes ``thumbnails``.

    ``offset``: the wall-clock time of stream time 0. ``seen``: the time of the newest frame.
    """

    def __init__(self, session: Session, thumbnails: Thumbnails) -> None:
        self.session, self.thumbnails, self.offset, self._due = session, thumbnails, 0.0, 0.0
        self.seen = Instant.now()
        self.thumbnails.begin(session.stats.frames)

    def watch(self, frame: Frame) -> None:
        self.seen = Instant.now()
        self.offset = self.seen.wall - frame.time_s
        newest = self.session.stats.frames - 1
        self.thumbnails.add(newest, frame.time_s, self.seen.wall, frame.image)
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        group = self.session.model.bundle.vision.group
        held = {number + of for number in view_memory(self.session).frames.tolist() for of in range(group)}
        self.thumbnails.keep(held, newest - self.session.chunk)  # the current chunk may not have been appended yet

    def close(self) -> None:
        self.thumbnails.close()


class LaneView(NamedTuple):
    """One policy's memory at one moment.

    ``right``: the number of correct answers. ``asked``: the number of questions.
    ``stopped_s``: the stream time at which a memory without eviction became full.
    """

    name: str
    memory: MemoryView
    stopped_s: float | None = None
    right: int = 0
    asked: int = 0


class Lane:
    """A session that is compared with others, and its newest answer to each question."""

    def __init__(self, name: str, session: Session) -> None:
        self.name, self.session, self.answers = name, session, dict[str, str]()
        self.stopped_s: float | None = None

    @contextmanager
    def stopping(self) -> Iterator[Session]:
        """Yield the session. If its cache is full, the session is dropped from the comparison."""
        try:
            yield self.session
        except UserError:
            self.stopped_s = self.session.time_s if self.stopped_s is None else self.stopped_s

    def view(self, facts: Sequence[Fact]) -> LaneView:
        asked = [self.answers[fact.question] == fact.truth for fact in facts if fact.question in self.answers]
        return LaneView(self.name, view_memory(self.session), self.stopped_s, sum(asked), len(asked))


class SideBySide:
    """Compares the run's memory with full KV and a sliding window, to show them on the terminal.

    All memories watch the same frames and are asked about objects that have left the picture. Threads other than the watching
    thread may use only :attr:`view`.
    ``session``: the run's session. The run passes frames to the session and closes it.
    ``open_session``: opens a session for comparison, or None to show only the run's memory.
    """

    def __init__(self, session: Session, open_session: Callable[[str, str | None], Session] | None = None) -> None:
        self.lanes = [Lane(f"auto: {session.policy}" if session.basis.startswith("auto") else session.policy, session)]
        if open_session is not None:
            full, window = open_session("full", FULL_BUDGET), open_session("sliding-window", None)
            self.lanes = [Lane("full KV", full), *self.lanes, Lane("sliding window", window)]
        self.others = [lane for lane in self.lanes if lane.session is not session]
        self.view: list[LaneView] = []  # empty until the first frame is watched
        self._turn, self._due = 0, 0.0

    def watch(self, frame: Frame) -> None:
        """Pass a frame to the compared sessions, then ask every session the same question."""
        for lane in self.others:
            if lane.stopped_s is None:
                with lane.stopping() as session:
                    session.watch(frame.image if frame.pixels is None else frame.pixels, frame.time_s)
        facts = frame.scene.departed()[:FACTS] if frame.scene is not None and self.others else []
        if facts:
            self._turn += 1
            asked = facts[self._turn % len(facts)].question
            for lane in self.lanes:
                with lane.stopping() as session:
                    lane.answers[asked] = session.ask(asked).text.strip()
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            self.view = [lane.view(facts) for lane in self.lanes]

    def close(self) -> None:
        for lane in self.others:
            lane.session.close()
