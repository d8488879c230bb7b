"""A video is decoded once: all sessions watch it side by side, and are asked when the stream reaches a question's time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np

from edgevlm.apps.sources.video import VideoSource
from edgevlm.bench.suites.dataset import Poll, SuiteQuestion
from edgevlm.bench.suites.fields import LETTERS
from edgevlm.bench.suites.scoring import Record, marks_of
from edgevlm.calib.accuracy.memory_accounting import PeakBytes, bytes_per_token
from edgevlm.calib.accuracy.variants import SkippedRun, Variant, VariantRun, equal_byte_runs, reason_of
from edgevlm.calib.accuracy.worker import CHUNK, FeatureCache, policy_of
from edgevlm.errors import SourceError, UserError
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.engine import Engine
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.preprocess import Pixels, Preprocessor
from edgevlm.runtime.session import Session

ANSWER = "answer"  # the kind of record that an answer is
Opened = tuple[Session, Policy]
EVERY_S = 1.0  # between two polls


def record_of(question: SuiteQuestion, run: VariantRun, response: str, **more: object) -> Record:
    """What the journal keeps of an answer. Times in seconds of the video; options: None for long lists."""
    poll = question.poll
    record: Record = {
        "kind": ANSWER, "policy": run.label, "budget": run.budget, "record": question.id, "video": question.video,
        "category": question.category, "subtask": question.subtask, "question": question.text, "prompt": question.prompt,
        "options": list(question.options), "answer": question.answer, "scoring": question.scoring, "time_s": question.due_s,
        "clip": question.clip, "due_s": poll.due_s if poll else None, "triggered_s": None, "polls": 0, "frames": 0,
        "seen_until_s": None, "late_s": None, "error": None, "damaged": False, "response": response, **more,
    }  # fmt: skip
    marks = marks_of(record)
    record["marks"] = None if marks is None else list(marks)
    if len(question.options) > len(LETTERS):
        record["options"] = None
    return record


class Viewer:
    """One session: a policy at a budget that watches one clip. Times are the video's, the session's begin with the clip."""

    def __init__(self, run: VariantRun, opened: Opened, questions: Sequence[SuiteQuestion], start: float) -> None:
        self.records: list[Record] = []
        self._run, self._start = run, start
        self._session, self._policy = opened
        self._due = [(_due(question), place, question) for place, question in enumerate(questions)]
        heapq.heapify(self._due)
        self._peak = PeakBytes()
        self._frames, self._seen_s = 0, math.nan
        self._polls: dict[str, tuple[int, int]] = {}  # of a question: how often it was asked, and frames at the last time

    @property
    def done(self) -> bool:
        return not self._due

    def watch(self, pixels: Pixels, time_s: float) -> None:
        """A frame: first what is due before it is asked. A session that cannot go on says so in its records."""
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
            self._peak.measure(self._session.cache, self._policy)

    def finish(self, end_s: float) -> None:
        """The video ends: what was due later is asked now, and its record says how much later."""
        self._ask_until(math.nextafter(end_s, math.inf))
        while self._due:
            due, _, question = heapq.heappop(self._due)
            late = max(question.poll.due_s if question.poll else due, end_s) - end_s
            late_s = round(late, 3) if 0 < late < math.inf else None
            if question.poll is not None:
                self._add(question, "", late_s=late_s, polls=self._polls.get(question.id, (0, 0))[0])
            else:
                self._ask(question, late_s=late_s)

    def fail(self, reason: str, damaged: bool = False) -> None:
        """What is left cannot be answered; damaged: because the video cannot be read."""
        for _, _, question in sorted(self._due, key=lambda due: due[:2]):
            self._add(question, "", error=reason, damaged=damaged)
        self._due = []

    def close(self) -> None:
        self._session.close()

    def _ask_until(self, time_s: float) -> None:
        """Ask what is due before ``time_s``: it has seen every frame up to its own time and none after."""
        while self._due and self._due[0][0] < time_s:
            due, place, question = heapq.heappop(self._due)
            if question.poll is None:
                self._ask(question)
            elif not self._triggered(question, question.poll, due):
                if due + EVERY_S <= question.poll.until_s:
                    heapq.heappush(self._due, (due + EVERY_S, place, question))
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
        if answer is None:
            return True
        says_yes = "yes" in answer.text.lower()
        if says_yes:
            self._ask(question, triggered_s=due, polls=asked + 1)
        return says_yes

    def _ask(self, question: SuiteQuestion, **facts: object) -> None:
        if not self._frames:
            self._add(question, "", **facts, error="no frame comes before its time; give a higher --fps")
        elif (answer := self._answered(question, question.prompt)) is not None:
            self._add(question, answer.text, **facts, ttft_ms=round(answer.ttft_ms, 2))

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

    def _add(self, question: SuiteQuestion, response: str, **facts: object) -> None:
        self._peak.measure(self._session.cache, self._policy)
        seen = None if math.isnan(self._seen_s) else round(self._seen_s, 3)
        watched = {"frames": self._frames, "seen_until_s": seen, "tokens": self._run.tokens, "bytes": self._peak.bytes}
        self.records.append(record_of(question, self._run, response, **(watched | facts)))


def _due(question: SuiteQuestion) -> float:
    return math.inf if question.due_s is None else question.due_s


@dataclass(slots=True)
class Segment:
    """The questions about one clip of a video. open_session: makes a run's session when the clip begins."""

    clip: tuple[float, float] | None
    questions: list[SuiteQuestion]
    runs: Sequence[VariantRun]
    open_session: Callable[[VariantRun], Opened]
    records: list[Record] = field(default_factory=list)
    viewers: list[Viewer] | None = None
    over: bool = False

    def step(self, pixels: Callable[[], Pixels], time_s: float) -> None:
        """A frame of the video, if it is of this clip; after the clip the sessions are closed."""
        start, end = self.clip or (0.0, math.inf)
        if self.over or time_s < start:
            return
        for viewer in self._started(start):
            if time_s > end:
                viewer.finish(end)
            else:
                viewer.watch(pixels(), time_s)
        if all(viewer.done for viewer in self.viewers or ()):
            self.close()

    def finish(self, end_s: float) -> None:
        """The video is over."""
        start = self.clip[0] if self.clip else 0.0
        if self.viewers is None and start >= end_s:
            reason = f"its clip begins at {start:g} s and the video ends at {end_s:g} s"
            self._leave(reason, late_s=round(start - end_s, 3))
        for viewer in [] if self.over else self._started(start):
            viewer.finish(end_s)
        self.close()

    def fail(self, reason: str) -> None:
        """The video cannot be read on."""
        if self.viewers is None:
            self._leave(reason, damaged=True)
        for viewer in self.viewers or ():
            viewer.fail(reason, damaged=True)
        self.close()

    def close(self) -> None:
        """Close the sessions; their records stay."""
        for viewer in self.viewers or ():
            self.records += viewer.records
            viewer.close()
        self.viewers, self.over = [], True

    def _leave(self, reason: str, **facts: object) -> None:
        self.records += [record_of(q, run, "", error=reason, **facts) for run in self.runs for q in self.questions]
        self.viewers, self.over = [], True

    def _started(self, start: float) -> list[Viewer]:
        if self.viewers is None:
            self.viewers = []
            for run in self.runs:  # one by one: those that are open are closed if the next cannot be
                self.viewers.append(Viewer(run, self.open_session(run), self.questions, start))
        return self.viewers


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """What a worker starts from. text_budget: of every session; threads: of one call of the model, None for all cores."""

    model: str
    data: Path
    fps: float
    text_budget: TextBudget
    threads: int | None = 1


@dataclass(frozen=True, slots=True)
class VideoTask:
    """One video: all that is asked of it, and the policies and budgets that have not answered yet."""

    video: str
    questions: tuple[SuiteQuestion, ...]
    runs: tuple[VariantRun, ...]


class VideoWorker:
    """Shows videos and collects answers. model: one that is loaded already. Raises UserError as ``Model.load`` does."""

    def __init__(self, settings: VideoSettings, model: Model | None = None) -> None:
        self.settings = settings
        model = model or Model.load(settings.model, threads=settings.threads)
        self.features = FeatureCache(model.engine)
        self.model = replace(model, engine=cast(Engine, self.features))
        self._preprocess = Preprocessor(model.bundle.vision)

    def perform(self, task: VideoTask) -> list[Record]:
        """The answers to a video's questions. Raises UserError when the memory has no room for a session."""
        clips: dict[tuple[float, float] | None, list[SuiteQuestion]] = {}
        for question in task.questions:
            clips.setdefault(question.clip, []).append(question)
        segments = [Segment(clip, asked, task.runs, self._open_session) for clip, asked in clips.items()]
        try:
            self._show(task, segments)
        except SourceError as error:
            for segment in segments:
                segment.fail(str(error))
        finally:
            for segment in segments:
                segment.close()
            self.features.clear()
        return [record for segment in segments for record in segment.records]

    def _show(self, task: VideoTask, segments: Sequence[Segment]) -> None:
        """Show the video to all segments, until nothing is left to ask or it ends. Raises SourceError, and UserError."""
        source = VideoSource(self.settings.data / task.video, self.settings.fps)
        try:
            for frame in source:
                pixels = cache(lambda image=frame.image: Pixels(self._preprocess(image)))
                for segment in segments:
                    segment.step(pixels, frame.time_s)
                self.features.clear()
                if all(segment.over for segment in segments):
                    return
            for segment in segments:
                segment.finish(source.end_s)
        finally:
            source.close()

    def _open_session(self, run: VariantRun) -> Opened:
        variant = Variant(run.label)
        policy = policy_of(variant, self.model, run.tokens)
        session = Session.open(
            self.model, policy=policy, budget=run.tokens or None, reindexing=variant.reindexing, chunk=CHUNK,
            text_budget=self.settings.text_budget, append=variant.append, encode=variant.encode,
        )  # fmt: skip
        return session, policy

    def runs(self, variants: Sequence[Variant], budget: str, tokens: int) -> Iterator[VariantRun | SkippedRun]:
        """Each variant at ``tokens`` or at the most that takes no more bytes than a sliding window of as many."""
        per_token, least = bytes_per_token(self.model.bundle), self.model.rows_per_frame
        yield from equal_byte_runs(variants, budget, tokens, per_token, least, self.peak_bytes)

    def peak_bytes(self, variant: Variant, tokens: int) -> int:
        """Bytes that cache and policy take at most, watching noise until the memory has been full for two chunks.

        tokens: 0 for all that the model can hold, of which only the cache is measured.
        """
        session, policy = self._open_session(VariantRun(variant.label, "", tokens))
        peak = PeakBytes()
        with session:
            for number in range(tokens // self.model.rows_per_frame + 2 * CHUNK if tokens else 0):
                noise = np.random.default_rng(number % CHUNK).integers(0, 256, (64, 64, 3), np.uint8)
                session.watch(noise)
                if (number + 1) % CHUNK == 0:
                    peak.measure(session.cache, policy)
            peak.measure(session.cache, policy)
        self.features.clear()
        return peak.bytes
