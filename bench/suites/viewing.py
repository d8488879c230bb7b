"""Decode a video once and show it to several sessions. When a question is due, every session is asked."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np

from edgevlm.apps.sources.recordings import VideoSource
from edgevlm.bench.suites.records import Poll, SuiteQuestion
from edgevlm.bench.suites.scoring import Record, is_right
from edgevlm.calib.accuracy.memory_accounting import PeakBytes, bytes_per_token
from edgevlm.calib.accuracy.variants import SkippedRun, Variant, VariantRun, equal_byte_runs, reason_of
from edgevlm.calib.accuracy.worker import CHUNK, FeatureCache, open_variant, policy_of
from edgevlm.errors import SourceError, UserError
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.engine import DEFAULT_ENGINE, Engine
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.preprocess import Pixels, Preprocessor
from edgevlm.runtime.session import Session

EVERY_S = 1.0
ASKED = ("video", "category", "subtask", "prompt", "options", "answer", "scoring", "time_s")  # copied from the SuiteQuestion


class Viewer:
    """A session that watches a video with one policy and budget."""

    def __init__(self, worker: VideoWorker, run: VariantRun, questions: Sequence[SuiteQuestion]) -> None:
        self.records: list[Record] = []
        self._run, self._questions = run, questions
        self.session, self._policy = worker.open_session(run)
        self._due = sorted((question.time_s, place) for place, question in enumerate(questions))
        self._peak, self._frames, self._seen_s = PeakBytes(), 0, math.nan
        self._polled: dict[int, list[int]] = {}  # question -> the number of frames watched at each of its polls

    @property
    def over(self) -> bool:
        return not self._due

    def step(self, pixels: Callable[[], Pixels], time_s: float) -> None:
        """Ask the questions that are due before a frame, then watch it."""
        self._ask_until(time_s)
        if self.over:
            return
        try:
            self.session.watch(pixels(), time_s)
        except UserError as error:
            self.fail(reason_of(error))
            return
        self._frames, self._seen_s = self._frames + 1, time_s
        if self._frames % self.session.chunk == 0:
            self._peak.measure(self.session.cache, self._policy)

    def finish(self, end_s: float) -> None:
        """Ask the remaining questions at the end of the video. If the answer to a poll was never yes, an empty answer is
        saved.
        """
        self._ask_until(math.nextafter(end_s, math.inf))
        while self._due:
            _, place = self._due.pop(0)
            if self._questions[place].poll is None:
                self._ask(place)
            else:
                self._add(place, "")

    def fail(self, reason: str, **facts: object) -> None:
        """Save the reason why the remaining questions cannot be answered. ``facts``: more fields, such as ``damaged``."""
        left, self._due = self._due, []
        for _, place in left:
            self._add(place, "", error=reason, **facts)

    def _ask_until(self, time_s: float) -> None:
        while self._due and self._due[0][0] < time_s:
            due, place = self._due.pop(0)
            poll = self._questions[place].poll
            if poll is None:
                self._ask(place)
            elif not self._triggered(place, poll, due):
                if due + EVERY_S <= poll.until_s:
                    insort(self._due, (due + EVERY_S, place))
                else:
                    self._add(place, "")

    def _triggered(self, place: int, poll: Poll, due: float) -> bool:
        """Return whether the model answers yes to a poll. The model is asked again only after a new frame."""
        polled = self._polled.setdefault(place, [])
        if self._frames in (0, *polled):
            return False
        polled.append(self._frames)
        answer = self._answered(place, poll.prompt)
        says_yes = answer is not None and "yes" in answer.text.lower()
        if says_yes:
            self._ask(place, triggered_s=due)
        return says_yes or answer is None

    def _ask(self, place: int, **facts: object) -> None:
        if not self._frames:
            self._add(place, "", **facts, error="no frame precedes the question; set a higher --fps")
        elif (answer := self._answered(place, self._questions[place].prompt)) is not None:
            self._add(place, answer.text, **facts, ttft_ms=round(answer.ttft_ms, 2))

    def _answered(self, place: int, prompt: str) -> Answer | None:
        """Return the answer to a prompt. After a failure, save the error and return None."""
        checked = False
        try:
            self.session.check(prompt)
            checked = True
            answer = self.session.ask(prompt, max_tokens=min(self._questions[place].tokens, self.session.text_budget.answer))
            answer.wait()
        except UserError as error:
            self._add(place, "", error=reason_of(error))
            if checked:
                self.fail(reason_of(error))
            return None
        return answer

    def _add(self, place: int, response: str, **facts: object) -> None:
        """Save an answer as a record. Times are in seconds of the video."""
        self._peak.measure(self.session.cache, self._policy)
        question = self._questions[place]
        asked = {name: getattr(question, name) for name in ASKED}
        record: Record = {
            "policy": self._run.label, "budget": self._run.budget, "record": question.id, **asked, "question": question.text,
            "due_s": question.poll.due_s if question.poll else None, "triggered_s": None,
            "polls": len(self._polled.get(place, ())), "frames": self._frames,
            "seen_until_s": None if math.isnan(self._seen_s) else round(self._seen_s, 3), "tokens": self._run.tokens,
            "bytes": self._peak.bytes, "error": None, "damaged": False, "response": response, **facts,
        }  # fmt: skip
        self.records.append({**record, "right": is_right(record)})


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """A worker's settings. ``threads``: cores for a model call; None means all."""

    model: str
    data: Path
    fps: float
    text_budget: TextBudget
    threads: int | None = 1
    engine: str = DEFAULT_ENGINE


@dataclass(frozen=True, slots=True)
class VideoTask:
    """A video with its questions, and the runs that have not answered all of them yet."""

    video: str
    questions: tuple[SuiteQuestion, ...]
    runs: tuple[VariantRun, ...]


class VideoWorker:
    """Shows videos to policies and collects their answers. Raises the same errors as ``Model.load``."""

    def __init__(self, settings: VideoSettings, model: Model | None = None) -> None:
        self.settings = settings
        model = model or Model.load(settings.model, engine=settings.engine, threads=settings.threads)
        self.features = FeatureCache(model.engine)
        self.model = replace(model, engine=cast(Engine, self.features))
        self._preprocess = Preprocessor(model.bundle.vision)

    def perform(self, task: VideoTask) -> list[Record]:
        """Return the answers of all runs about a video, as records. Raises UserError if a session does not fit in memory."""
        viewers: list[Viewer] = []
        with ExitStack() as stack:
            stack.callback(self.features.clear)
            for run in task.runs:
                viewers.append(Viewer(self, run, task.questions))
                stack.enter_context(viewers[-1].session)
            try:
                with closing(VideoSource(self.settings.data / task.video, self.settings.fps)) as source:
                    for frame in source:
                        pixels = cache(lambda image=frame.image: Pixels(self._preprocess(image)))
                        for viewer in viewers:
                            viewer.step(pixels, frame.time_s)
                        self.features.clear()
                        if all(viewer.over for viewer in viewers):
                            break
                    for viewer in viewers:
                        viewer.finish(source.end_s)
            except SourceError as error:
                for viewer in viewers:
                    viewer.fail(str(error), damaged=True)
        return [record for viewer in viewers for record in viewer.records]

    def open_session(self, run: VariantRun) -> tuple[Session, Policy]:
        variant = Variant(run.label)
        policy = policy_of(variant, self.model, run.tokens)
        return open_variant(self.model, policy, run.tokens or None, variant, self.settings.text_budget), policy

    def runs(self, variants: Sequence[Variant], budget: str, tokens: int) -> Iterator[VariantRun | SkippedRun]:
        """Find, for each variant, the largest budget that needs no more bytes than a sliding window of ``tokens``."""
        per_token, least = bytes_per_token(self.model.bundle), self.model.rows_per_frame
        yield from equal_byte_runs(variants, budget, tokens, per_token, least, self.peak_bytes)

    def peak_bytes(self, variant: Variant, tokens: int) -> int:
        """Return the peak size in bytes of cache and policy while a session watches more noise than its budget holds.

        ``tokens``: the budget. With a budget of 0, the cache has room for as many tokens as the model allows, and is measured
        while it is empty.
        """
        session, policy = self.open_session(VariantRun(variant.label, "", tokens))
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
