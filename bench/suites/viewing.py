"""A video is decoded once: all sessions watch it side by side, and are asked when the stream reaches a question's time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.folder import FolderSource
from edgevlm.apps.sources.video import VideoSource
from edgevlm.bench.suites.records import record_of
from edgevlm.bench.suites.schema import Poll, SuiteQuestion
from edgevlm.bench.suites.scoring import Record
from edgevlm.calib.accuracy.variants import Run, reason_of
from edgevlm.calib.footprint import Footprint
from edgevlm.errors import SourceError, UserError
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.preprocess import Pixels, Preprocessor
from edgevlm.runtime.session import Session

Opened = tuple[Session, Policy]
VideoOrFolder = VideoSource | FolderSource
EVERY_S = 1.0  # between two polls


class SessionViewer:
    """One session: a policy at a budget that watches one clip. Times are the video's, the session's begin with the clip."""

    def __init__(self, run: Run, opened: Opened, questions: Sequence[SuiteQuestion], start: float) -> None:
        self.records: list[Record] = []
        self._cell, self._start = run, start
        self._session, self._policy = opened
        self._agenda = [(_due(question), place, question) for place, question in enumerate(questions)]
        heapq.heapify(self._agenda)
        self._footprint = Footprint()
        self._frames, self._seen_s = 0, math.nan
        self._polls: dict[str, tuple[int, int]] = {}  # of a question: how often it was asked, and frames at the last time

    @property
    def done(self) -> bool:
        return not self._agenda

    def watch(self, pixels: Pixels, time_s: float) -> None:
        """A frame: first what is due before it is asked. Raises nothing: a session that cannot go on says so in its records."""
        self._ask_until(time_s)
        if self.done:
            return
        try:
            self._session.watch(pixels, time_s - self._start)
        except UserError as error:
            self.fail(reason_of(error))
            return
        self._frames, self._seen_s = self._frames + 1, time_s
        if self._frames % self._session.chunk == 0:
            self._footprint.measure(self._session.cache, self._policy)

    def finish(self, end_s: float) -> None:
        """The video ends: what was due later is asked now, and its record says how much later."""
        self._ask_until(math.nextafter(end_s, math.inf))
        while self._agenda:
            due, _, question = heapq.heappop(self._agenda)
            late = max(question.poll.due_s if question.poll else due, end_s) - end_s
            late_s = round(late, 3) if 0 < late < math.inf else None
            if question.poll is not None:
                self._add(question, "", late_s=late_s, polls=self._polls.get(question.id, (0, 0))[0])
            else:
                self._ask(question, late_s)

    def fail(self, reason: str, damaged: bool = False) -> None:
        """What is left cannot be answered; damaged: because the video cannot be read."""
        for _, _, question in sorted(self._agenda, key=lambda variant: variant[:2]):
            self._add(question, "", error=reason, damaged=damaged)
        self._agenda = []

    def close(self) -> None:
        self._session.close()

    def _ask_until(self, time_s: float) -> None:
        """Ask what is due before ``time_s``: it has seen every frame up to its own time and none after."""
        while self._agenda and self._agenda[0][0] < time_s:
            due, place, question = heapq.heappop(self._agenda)
            if question.poll is None:
                self._ask(question)
            elif not self._triggered(question, question.poll, due):
                if due + EVERY_S <= question.poll.until_s:
                    heapq.heappush(self._agenda, (due + EVERY_S, place, question))
                else:
                    self._add(question, "", polls=self._polls[question.id][0])

    def _triggered(self, question: SuiteQuestion, poll: Poll, due: float) -> bool:
        """Whether the model says that the moment has come, and if so its answer; a memory that is as it was says so again."""
        asked, frames = self._polls.get(question.id, (0, 0))
        if frames == self._frames and asked:
            return False
        self._polls[question.id] = asked + 1, self._frames
        if not self._frames:
            return False
        answer = self._answered(question, poll.prompt)
        if answer is not None and "yes" in answer.text.lower():
            self._ask(question, triggered_s=due, polls=asked + 1)
        return answer is None or "yes" in answer.text.lower()

    def _ask(
        self, question: SuiteQuestion, late_s: float | None = None, *, triggered_s: float | None = None, polls: int = 0
    ) -> None:
        if not self._frames:
            self._add(question, "", late_s=late_s, error="no frame comes before its time; give a higher --fps")
            return
        answer = self._answered(question, question.prompt)
        if answer is not None:
            times = {"late_s": late_s, "triggered_s": triggered_s, "ttft_ms": round(answer.ttft_ms, 2)}
            self._add(question, answer.text, polls=polls, **times)

    def _answered(self, question: SuiteQuestion, prompt: str) -> Answer | None:
        """The answer; None, and a record that says why, where there is none. A memory that is full answers nothing any more."""
        try:
            self._session.check(prompt)
        except UserError as error:
            self._add(question, "", error=reason_of(error))
            return None
        try:
            answer = self._session.ask(prompt, max_tokens=min(question.tokens, self._session.text_budget.answer))
            answer.wait()
        except UserError as error:
            self._add(question, "", error=reason_of(error))
            self.fail(reason_of(error))
            return None
        return answer

    def _add(self, question: SuiteQuestion, response: str, **more: object) -> None:
        self._footprint.measure(self._session.cache, self._policy)
        seen = None if math.isnan(self._seen_s) else round(self._seen_s, 3)
        facts = {"frames": self._frames, "seen_until_s": seen, "tokens": self._cell.tokens, "bytes": self._footprint.peak}
        self.records.append(record_of(question, self._cell, response, facts | more))


def _due(question: SuiteQuestion) -> float:
    return math.inf if question.due_s is None else question.due_s


@dataclass(slots=True)
class Segment:
    """The questions about one clip of a video. opened: makes a run's session; seats are taken when the clip begins."""

    clip: tuple[float, float] | None
    questions: list[SuiteQuestion]
    runs: Sequence[Run]
    opened: Callable[[Run], Opened]
    records: list[Record] = field(default_factory=list)
    _seats: list[SessionViewer] | None = None
    over: bool = False

    def step(self, pixels: Callable[[], Pixels], time_s: float) -> None:
        """A frame of the video, if it is of this clip; after the clip the seats are given up."""
        start, end = self.clip or (0.0, math.inf)
        if self.over or time_s < start:
            return
        for seat in self._taken(start):
            if time_s > end:
                seat.finish(end)
            else:
                seat.watch(pixels(), time_s)
        if all(seat.done for seat in self._seats or ()):
            self.close()

    def finish(self, end_s: float) -> None:
        """The video is over."""
        start = self.clip[0] if self.clip else 0.0
        if self._seats is None and start >= end_s:
            reason = f"its clip begins at {start:g} s and the video ends at {end_s:g} s"
            self._leave(reason, late_s=round(start - end_s, 3))
        for seat in [] if self.over else self._taken(start):
            seat.finish(end_s)
        self.close()

    def fail(self, reason: str) -> None:
        """The video cannot be read on."""
        if self._seats is None:
            self._leave(reason, damaged=True)
        for seat in self._seats or ():
            seat.fail(reason, damaged=True)
        self.close()

    def close(self) -> None:
        """Give up the seats; their records stay."""
        for seat in self._seats or ():
            self.records += seat.records
            seat.close()
        self._seats, self.over = [], True

    def _leave(self, reason: str, **more: object) -> None:
        facts = {"error": reason, **more}
        self.records += [record_of(question, run, "", facts) for run in self.runs for question in self.questions]
        self._seats, self.over = [], True

    def _taken(self, start: float) -> list[SessionViewer]:
        if self._seats is None:
            self._seats = []
            for run in self.runs:
                self._seats.append(SessionViewer(run, self.opened(run), self.questions, start))
        return self._seats


def _prepared(preprocess: Preprocessor, image: NDArray[np.uint8]) -> Pixels:
    return Pixels(preprocess(image))


def segments_of(questions: Sequence[SuiteQuestion], runs: Sequence[Run], opened: Callable[[Run], Opened]) -> list[Segment]:
    """A segment a clip."""
    clips: dict[tuple[float, float] | None, list[SuiteQuestion]] = {}
    for question in questions:
        clips.setdefault(question.clip, []).append(question)
    return [Segment(clip, asked, runs, opened) for clip, asked in clips.items()]


def view(source: VideoOrFolder, segments: Sequence[Segment], preprocess: Preprocessor, after_frame: Callable[[], None]) -> None:
    """Show the video to all segments, until nothing is left to ask or it ends. Raises UserError for want of memory."""
    try:
        for frame in source:
            pixels = cache(partial(_prepared, preprocess, frame.image))
            for segment in segments:
                segment.step(pixels, frame.time_s)
            after_frame()
            if all(segment.over for segment in segments):
                return
        for segment in segments:
            segment.finish(source.end_s)
    except SourceError as error:
        for segment in segments:
            segment.fail(str(error))
    finally:
        source.close()
        for segment in segments:
            segment.close()
