"""The demo's stream under several policies at once, to see what each forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgevlm.apps.run.memory_view import MemoryView, view_memory
from edgevlm.apps.sources import Frame
from edgevlm.apps.sources.base import Fact
from edgevlm.errors import UserError
from edgevlm.runtime.session import Session

FULL_BUDGET = "1920"  # tokens that the full cache has room for
FACTS = 8  # departed objects that are asked about
PROBING = 0.4  # of the time, at most


@dataclass(slots=True)
class Lane:
    """One policy's session. ``stopped_s``: the stream's time at which its memory was full and nothing could be evicted."""

    name: str
    session: Session
    stopped_s: float | None = None
    answers: dict[str, str] = field(default_factory=dict)  # the newest to each question asked of every lane

    @contextmanager
    def stopping(self, time_s: float) -> Iterator[None]:
        """Stop this memory, not the comparison, where the block finds the cache full."""
        try:
            yield
        except UserError:
            self.stopped_s = time_s if self.stopped_s is None else self.stopped_s


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane at one moment."""

    name: str
    memory: MemoryView
    stopped_s: float | None
    answers: dict[str, str]


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """All lanes at one moment, and what they have been asked about: objects that left, the newest first."""

    lanes: tuple[LaneView, ...]
    facts: tuple[Fact, ...]
    time_s: float


class SideBySide:
    """Feeds every frame of the demo to each lane and keeps asking all of them where departed objects were.

    ``session`` is the run's own, which the run feeds. Used by the thread that watches; :attr:`view` by any.
    """

    own = 1  # the place of the run's own lane, between a full cache and a sliding window

    def __init__(self, session: Session, open_session: Callable[[str, str | None], Session]) -> None:
        self._open_session = open_session
        self.lanes: list[Lane] = []
        self.reopen(session, None)
        self.view: ComparisonView | None = None
        self._asked_at: dict[str, int] = {}  # which probe asked a question last
        self._probes = 0
        self._resume_at = 0.0

    def reopen(self, session: Session, budget: str | None) -> None:
        """Start again beside another session of the run's own; every memory is empty, and the window has its budget."""
        self.close()
        full, window = self._open_session("full", FULL_BUDGET), self._open_session("sliding-window", budget)
        self.lanes = [Lane("full KV", full), Lane(_name(session), session), Lane("sliding window", window)]

    @property
    def others(self) -> list[Lane]:
        """The lanes beside the run's own."""
        return [lane for place, lane in enumerate(self.lanes) if place != self.own]

    def watch(self, frame: Frame) -> None:
        """Take in a frame that the first lane has taken in, and ask one question of every lane."""
        for lane in self.others:
            if lane.stopped_s is None:
                with lane.stopping(frame.time_s):
                    lane.session.watch(frame.image if frame.pixels is None else frame.pixels, frame.time_s)
        facts = tuple(frame.scene.departed()[:FACTS]) if frame.scene is not None else ()
        if facts and time.monotonic() >= self._resume_at:
            self._probe(facts, frame.time_s)
        lanes = (LaneView(lane.name, view_memory(lane.session), lane.stopped_s, dict(lane.answers)) for lane in self.lanes)
        self.view = ComparisonView(tuple(lanes), facts, frame.time_s)

    def ask(self, question: str) -> list[tuple[str, str]]:
        """Every other lane's name and answer; raises UserError as :meth:`Session.ask` does."""
        answers = []
        for lane in self.others:
            with lane.stopping(lane.session.time_s):
                answers.append((lane.name, lane.session.ask(question).text.strip()))
        return answers

    def close(self) -> None:
        for lane in self.others:
            lane.session.close()

    def _probe(self, facts: tuple[Fact, ...], time_s: float) -> None:
        """Ask about the object that was asked about longest ago."""
        began = time.monotonic()
        asked = {fact.question: self._asked_at.get(fact.question, 0) for fact in facts}
        question = min(asked, key=lambda text: asked[text])
        self._probes += 1
        self._asked_at = {**asked, question: self._probes}
        for lane in self.lanes:
            lane.answers = {text: answer for text, answer in lane.answers.items() if text in asked}
            with lane.stopping(time_s):
                lane.answers[question] = lane.session.ask(question).text.strip()
        spent = time.monotonic() - began
        self._resume_at = began + spent / PROBING


def _name(session: Session) -> str:
    return f"auto: {session.policy}" if session.basis.startswith("auto") else session.policy
