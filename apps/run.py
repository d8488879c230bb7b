"""The loop behind ``edgevlm run``: frames from a source into a session, questions out of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import psutil

from edgevlm.apps.output import Answered, Output, Stats
from edgevlm.apps.sources import Frame, Source
from edgevlm.apps.sources.base import Scene
from edgevlm.apps.trouble import Trouble
from edgevlm.errors import UserError
from edgevlm.runtime.session import Session

NEVER_TAUGHT = "The demo model was never taught this question; `edgevlm run --questions` lists those it knows."


@dataclass(slots=True)
class Plan:
    """What a run is to do. ``at``: questions with their stream time in seconds; ``end``: those for the end of the stream."""

    frames: int | None = None
    seconds: float | None = None
    end: list[str] = field(default_factory=list)
    at: list[tuple[float, str]] = field(default_factory=list)
    sample: np.random.Generator | None = None  # draws questions of the program's own, every SAMPLE_EVERY frames

    def __post_init__(self) -> None:
        self.at.sort(key=lambda item: item[0])

    @property
    def questions(self) -> list[str]:
        """All that is planned."""
        return [*(question for _, question in self.at), *self.end]


SAMPLE_EVERY = 16  # frames
REMEMBERED = 64  # frames whose truth is kept for questions that are being answered


class Run:
    """Watches until the source ends, a limit is reached, or :meth:`stop` is called."""

    def __init__(self, session: Session, source: Source, output: Output, plan: Plan) -> None:
        self.session, self.source, self.output, self.plan = session, source, output, plan
        self.frame: Frame | None = None  # the newest one watched
        self._scenes: deque[tuple[float, Scene]] = deque(maxlen=REMEMBERED)  # of the newest frames, with their times
        self._started = self._last_time = time.monotonic()
        self._last_frames = self._gated = 0
        self._stopped = threading.Event()
        self._trouble = Trouble(source)
        self._process = psutil.Process()

    def stop(self) -> None:
        """End the run after the frame in progress; from any thread."""
        self._stopped.set()

    def check(self) -> None:
        """Raise UserError if a planned question cannot be asked, before anything is watched."""
        for text in self.plan.questions:
            if (question := self._as_taught(text)) is not None:
                self.session.check(question)

    def __call__(self) -> None:
        """Run to the end and write the summary, whatever ends it; questions for the end are asked unless interrupted."""
        try:
            with self._ticking():
                self._watch()
                self._ask_rest()
        finally:
            self.source.close()
            self.session.close()
            self.output.summary(self.stats(overall=True))

    def ask(self, text: str, conversation: str | None = None) -> Answered | None:
        """Ask, write the answer as it comes, and return it. May be called from another thread than the loop's.

        Before the first frame there is nothing to answer from: then it says so and returns None.
        """
        if self.frame is None:
            self.output.notice(f"no frame has been watched yet, so {text!r} is not answered")
            return None
        question = self._as_taught(text)
        if question is None:
            answered = Answered(self.session.time_s, text, NEVER_TAUGHT, [], 0.0, 0.0)
        else:
            answer = self.session.ask(question, conversation=conversation)
            for piece in answer:
                self.output.piece(piece)
            said, truth = answer.text.strip(), self._truth(text, answer.time_s)
            answered = Answered(answer.time_s, text, said, answer.token_ids, answer.ttft_ms, answer.tpot_ms, truth)
        self.output.answer(answered)
        return answered

    def stats(self, overall: bool = False) -> Stats:
        now, session = time.monotonic(), self.session.stats
        since, before = (self._started, 0) if overall else (self._last_time, self._last_frames)
        self._last_time, self._last_frames = now, session.frames
        drops = dict(self.source.drops)
        return Stats(
            frames=session.frames,
            dropped=sum(drops.values()),
            drops=drops,
            gated=self._gated,
            fps=(session.frames - before) / max(now - since, 1e-9),
            cache_tokens=session.tokens,
            cache_bytes=session.cache_bytes,
            compressions=session.memory.compressions,
            compress_ms=session.memory.compress_ms,
            rss_bytes=self._process.memory_info().rss,
            source_state=self.source.state.value,
            source_problem=self.source.problem,
            reconnects=self.source.reconnects,
        )

    def _watch(self) -> None:
        plan, watched = self.plan, 0
        while not self._stopped.is_set() and (plan.frames is None or watched < plan.frames):
            if (frame := self.source.read()) is None:
                break
            if plan.seconds is not None and frame.time_s > plan.seconds:
                break
            while plan.at and plan.at[0][0] < frame.time_s:
                self.ask(plan.at.pop(0)[1])
            if frame.scene is not None:
                self._scenes.append((frame.time_s, frame.scene))
            self._take(frame)
            watched += 1
            if plan.sample is not None and frame.scene is not None and watched % SAMPLE_EVERY == 0:
                for question in frame.scene.sample(plan.sample):
                    self.ask(question)

    def _take(self, frame: Frame) -> None:
        self._gated = frame.gated
        if frame.still:
            self.session.pass_by(frame.time_s)
            return
        self.session.watch(frame.image if frame.pixels is None else frame.pixels, frame.time_s)
        if self.frame is None and self.source.mode:
            self.output.notice(f"{self.source.name}: {self.source.mode}")
        self.frame = frame

    def _ask_rest(self) -> None:
        self.session.flush()  # once, and not under each question
        for time_s, question in self.plan.at:
            if self.frame is not None and time_s > self.session.time_s:
                self.output.notice(
                    f"the stream ended at {self.session.time_s:.1f} s: {question!r}, meant for {time_s:g} s, is asked now"
                )
            self.ask(question)
        for question in self.plan.end:
            self.ask(question)

    def _truth(self, question: str, time_s: float) -> str | None:
        """The right answer at the frame of that time, where the source knows it and the frame is not long gone."""
        scenes = [scene for at, scene in list(self._scenes) if at == time_s]
        return scenes[-1].truth(question) if scenes else None

    def _as_taught(self, text: str) -> str | None:
        """The question in the model's own words; None when it is the demo model and was never taught it."""
        if not self.session.model.is_demo:
            return text
        from edgevlm.apps.demo.questions import parse

        question = parse(text)
        return question.text if question is not None else None

    @contextmanager
    def _ticking(self) -> Iterator[None]:
        """Write the figures each second while the loop runs."""
        done = threading.Event()

        def tick() -> None:
            try:
                while not done.wait(1):
                    self.output.stats(self.stats())
                    if (news := self._trouble.news()) is not None:
                        self.output.notice(news)
            except (OSError, UserError):  # the loop's own writing meets it again, and says so
                self.stop()

        thread = threading.Thread(target=tick, name="edgevlm-stats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
