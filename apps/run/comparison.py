"""The demo's stream under several policies at once, to see what each forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from edgevlm.apps.run.memory_view import MemoryView, view_memory
from edgevlm.apps.sources import Frame
from edgevlm.calib.demo.scene import Fact
from edgevlm.errors import UserError
from edgevlm.runtime.session import Session

FULL_BUDGET = "1920"  # tokens that the full cache has room for
FACTS = 8  # departed objects that are asked about
PROBING = 0.4  # of the time, at most


@dataclass(slots=True)
class Lane:
    """One policy's session. ``stopped_s``: the stream's time at which its memory was full and nothing could be evicted.

    ``answers``: the newest to each question about :attr:`ComparisonView.facts`.
    """

    name: str
    session: Session
    memory: MemoryView
    stopped_s: float | None = None
    answers: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def stopping(self) -> Iterator[Session]:
        """Yield the session; where the block finds the cache full, stop this memory, not the comparison."""
        try:
            yield self.session
        except UserError:
            self.stopped_s = self.session.time_s if self.stopped_s is None else self.stopped_s


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """All lanes at one moment, and what they have been asked about: objects that left, the newest first."""

    lanes: tuple[Lane, ...]
    facts: tuple[Fact, ...]


class SideBySide:
    """Feeds every frame of the demo to each lane and keeps asking all of them where departed objects were.

    ``session`` is the run's own, which the run feeds and closes. Used by the thread that watches; :attr:`view` by any.
    """

    own = 1  # the place of the run's own lane, between a full cache and a sliding window

    def __init__(self, session: Session, open_session: Callable[[str, str | None], Session]) -> None:
        name = f"auto: {session.policy}" if session.basis.startswith("auto") else session.policy
        sessions = {"full KV": open_session("full", FULL_BUDGET), name: session}
        sessions["sliding window"] = open_session("sliding-window", None)
        self.lanes = [Lane(name, of, view_memory(of)) for name, of in sessions.items()]
        self.others = [lane for lane in self.lanes if lane.session is not session]
        self.view: ComparisonView | None = None
        self._asked_at: dict[str, int] = {}  # which probe asked a question last
        self._resume_at = 0.0

    def watch(self, frame: Frame) -> None:
        """Take in a frame that the run has taken in, and ask one question of every lane."""
        for lane in self.others:
            if lane.stopped_s is None:
                with lane.stopping() as session:
                    session.watch(frame.image if frame.pixels is None else frame.pixels, frame.time_s)
        facts = tuple(frame.scene.departed()[:FACTS]) if frame.scene is not None else ()
        if facts and time.monotonic() >= self._resume_at:
            self._probe([fact.question for fact in facts])
        for lane in self.lanes:
            lane.memory = view_memory(lane.session)
        self.view = ComparisonView(tuple(replace(lane, answers=dict(lane.answers)) for lane in self.lanes), facts)

    def ask(self, question: str) -> list[tuple[str, str]]:
        """Return every other lane's name and answer."""
        answers = []
        for lane in self.others:
            with lane.stopping() as session:
                answers.append((lane.name, session.ask(question).text.strip()))
        return answers

    def close(self) -> None:
        for lane in self.others:
            lane.session.close()

    def _probe(self, questions: list[str]) -> None:
        """Ask the question that was asked longest ago."""
        began = time.monotonic()
        question = min(questions, key=lambda text: self._asked_at.get(text, 0))
        self._asked_at[question] = 1 + max(self._asked_at.values(), default=0)
        for lane in self.lanes:
            lane.answers = {text: answer for text, answer in lane.answers.items() if text in questions}
            with lane.stopping() as session:
                lane.answers[question] = session.ask(question).text.strip()
        self._resume_at = began + (time.monotonic() - began) / PROBING
