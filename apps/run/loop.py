"""Pass a source's frames to a session and write the answers: the loop of ``edgevlm run``."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from edgevlm.apps.run.clock import Span, nothing_held, split_window
from edgevlm.apps.run.output import AnswerEvent, Output, StatsEvent, wall_clock
from edgevlm.apps.run.process import Notifier, ResidentMemory, Shutdown, is_gone, silence_if_gone, source_news
from edgevlm.apps.sources import Frame, Source, State
from edgevlm.calib.demo.questions import DemoScene
from edgevlm.errors import UserError
from edgevlm.progress import counted
from edgevlm.runtime.session import Session
from edgevlm.runtime.taught import never_taught, parse
from edgevlm.runtime.time_window import NothingHeld

SAMPLE_EVERY = 16  # frames from one round of sample questions to the next
CLOSING = 1.0
REMEMBERED = 64  # keep the right answers of this many frames, for questions that are still being answered


@dataclass(slots=True)
class RunPlan:
    """The questions planned for a run, and its limits.

    ``at``: questions with their stream times in seconds.
    ``end``: questions to ask at the end of the stream.
    """

    frames: int | None = None
    seconds: float | None = None
    end: list[str] = field(default_factory=list)
    at: list[tuple[float, str]] = field(default_factory=list)
    since: float = 0.0  # the stream time in seconds at which the source begins
    sample: np.random.Generator | None = None

    def __post_init__(self) -> None:
        self.at.sort(key=lambda item: item[0])

    @property
    def questions(self) -> list[str]:
        return [*(question for _, question in self.at), *self.end]


class Observer(Protocol):
    """Receives each frame that the session has watched."""

    def watch(self, frame: Frame) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class RunLoop:
    """Watches until the source ends, a limit is reached, or :meth:`stop` is called.

    ``stats_every``: the interval between statistics, in seconds.
    ``alone``: whether the process has no other run. If so, the run closes the session at its end, and also ends when stdout
    loses its reader.
    ``may_watch``: called before each frame; the run ends when ``may_watch`` returns False.
    ``listing``: the command that lists the demo model's questions.
    """

    session: Session
    source: Source
    output: Output
    plan: RunPlan
    observer: Observer | None = None
    stats_every: float = 1.0
    notifier: Notifier = field(default_factory=Notifier)
    alone: bool = True
    may_watch: Callable[[], bool] = lambda: True
    frame: Frame | None = None
    listing: str = "edgevlm run --questions"

    def __post_init__(self) -> None:
        self.started, self._stopped = threading.Event(), threading.Event()  # started is set after the first frame
        self._scenes: deque[tuple[float, DemoScene]] = deque(maxlen=REMEMBERED)
        self._begun = self._last = (time.monotonic(), self.session.stats.frames)
        self._offset: float | None = None
        self._reading, self._steps = False, 0
        self._seen = 0, self.source.attempts  # values at the last tick; a step is a frame or a piece of an answer
        self.shutdown = Shutdown(self.stop)
        self._resident = ResidentMemory()

    def stop(self) -> None:
        """End the run after the current frame; any thread may call it."""
        self._stopped.set()

    def ask_typed(self, text: str) -> None:
        """Wait for the first frame, then ask a question that a person typed. The watching thread must not call this method."""
        self.started.wait()
        self.ask(text, None if self.session.model.is_demo else "terminal")  # the demo model cannot hold a conversation

    def check(self) -> None:
        """Check the planned questions before the run starts. Raises UserError."""
        for text in self.plan.questions:
            plain, window = split_window(text)
            if (question := self.as_taught(plain)) is not None:
                self.session.check(question)
                self.session.check_window(**Span.typed(**window).seconds(0.0))

    def __call__(self) -> None:
        """Run to the end and write the summary. A signal interrupts a waiting run with KeyboardInterrupt."""
        ticking = threading.Thread(target=self._tick, name="edgevlm-stats", daemon=True)
        with self.shutdown:
            ticking.start()
            try:
                self._watch()
                if not self.shutdown.asked:
                    self._ask_rest()
            finally:
                self._stopped.set()
                ticking.join()
                if not self.shutdown.forced:  # a user who forces the end does not wait for the model
                    self._close()

    def _close(self) -> None:
        """Write the last snapshot, then the summary, even if closing the source hangs."""
        failed: list[UserError] = []

        def close() -> None:
            try:
                self.source.close()
            except UserError as error:
                failed.append(error)

        self.notifier.send(Notifier.STOPPING)
        closing = threading.Thread(target=close, name="edgevlm-closing", daemon=True)
        with suppress(RuntimeError):  # if no thread can start, the source is closed when the process ends
            closing.start()
        if self.alone:
            self.session.close()
            if self.observer is not None:
                self.observer.close()
        if closing.ident is not None:
            closing.join(CLOSING)
        if self.alone:
            silence_if_gone()
        stats, (since, before) = self.stats(self._begun), self._begun
        self.output.summary(stats, f"{counted(stats.frames - before, 'frame')} in {self._last[0] - since:.1f} s")
        if failed:
            raise failed[0]

    @property
    def offset(self) -> float | None:
        """The wall-clock time of stream time 0; None before the first frame and for a video file."""
        return self._offset if self.source.live else None

    def ask(self, text: str, conversation: str | None = None) -> None:
        """Ask a question and write the answer as it is generated; any thread may call it.

        Does nothing if the run is ending. ``/since 10m QUESTION`` asks about a time window. For a video file, ``10m`` counts
        back from the newest frame.
        """
        if self.shutdown.asked:
            return
        if not self.session.stats.frames:
            self.output.notice(f"cannot answer {text!r}: no frame has been watched yet")
            return
        plain, window = split_window(text)
        question = self.as_taught(plain)
        if question is None:
            why = never_taught(text, self.listing)
            self.output.answer(AnswerEvent(self.session.time_s, text, why, [], 0.0, 0.0, offset=self.offset))
            return
        offset = self.offset or time.time() - self.session.time_s
        answer = self.session.ask(question, conversation=conversation, **Span.typed(**window).seconds(offset))
        try:
            with self.shutdown.waiting():
                for piece in answer:
                    self._steps += 1
                    self.output.piece(piece)
        except NothingHeld as error:
            self.output.notice(str(error) if self.offset is None else nothing_held(error, offset))
            return
        truth = None if window else self.truth(text, answer.time_s)
        event = AnswerEvent(
            answer.time_s, text, answer.text.strip(), answer.token_ids, answer.ttft_ms, answer.tpot_ms, truth,
            answer.evidence, self.offset, self.fits,
        )  # fmt: skip
        self.output.answer(event)

    @property
    def fits(self) -> bool:
        """Return False if the demo model watches any source except the demo."""
        return not self.session.model.is_demo or self.frame is None or self.frame.scene is not None

    def stats(self, since: tuple[float, int]) -> StatsEvent:
        """Return current statistics. ``since``: the time and the frame count from which ``fps`` is measured."""
        session, source = self.session.stats, self.source
        self._last = now, frames = time.monotonic(), session.frames
        drops = dict(source.drops)
        store: dict[str, Any] = {} if session.store is None else {"store": asdict(session.store)}
        return StatsEvent(
            time=wall_clock(), frames=frames, dropped=sum(drops.values()), drops=drops,
            fps=(frames - since[1]) / max(now - since[0], 1e-9), policy=self.session.policy,
            cache_tokens=session.tokens, cache_bytes=session.cache_bytes,
            appended=round(session.memory.appended, 4), encoded=round(session.encoded, 4),
            compressions=session.memory.compressions, compress_ms=session.memory.compress_ms,
            rss_bytes=self._resident.nbytes(), source_state=source.state.value,
            source_problem=source.problem, reconnects=source.reconnects, **store,
        )  # fmt: skip

    def _watch(self) -> None:
        plan, watched = self.plan, 0
        while not self._stopped.is_set() and (plan.frames is None or watched < plan.frames):
            self._reading = True
            with self.shutdown.waiting():
                frame = self.source.read()
            self._reading = False
            if frame is None or not self.may_watch():
                break
            if plan.since:
                frame = replace(frame, time_s=plan.since + frame.time_s)
            if plan.seconds is not None and frame.time_s > plan.seconds:
                break
            while plan.at and plan.at[0][0] < frame.time_s:
                self.ask(plan.at.pop(0)[1])
            self._take(frame)
            self._steps += 1
            if not self.started.is_set():
                self.notifier.send(Notifier.READY)
                self.started.set()
            watched += 1
            if plan.sample is not None and frame.scene is not None and watched % SAMPLE_EVERY == 0:
                for question in frame.scene.sample(plan.sample):
                    self.ask(question)

    def _take(self, frame: Frame) -> None:
        if frame.scene is not None:
            self._scenes.append((frame.time_s, frame.scene))
        self.session.watch(frame.image if frame.pixels is None else frame.pixels, frame.time_s)
        if self.frame is None and self.source.mode:
            self.output.notice(f"{self.source.name}: {self.source.mode}")
        self.frame, self._offset = frame, time.time() - frame.time_s
        if self.observer is not None:
            self.observer.watch(frame)

    def _ask_rest(self) -> None:
        if self.plan.questions:
            self.session.flush()  # flush once, not before each question
        for time_s, question in self.plan.at:
            if self.session.stats.frames and time_s > self.session.time_s:
                ended = f"the stream ended at {self.session.time_s:.1f} s"
                self.output.notice(f"{ended}: asking {question!r} now instead of at {time_s:g} s")
            self.ask(question)
        while self.plan.end:
            self.ask(self.plan.end.pop(0))

    def truth(self, question: str, time_s: float) -> str | None:
        """Return the demo world's right answer at ``time_s``, or None if it is unknown."""
        scenes = [scene for at, scene in list(self._scenes) if at == time_s]
        return scenes[-1].truth(question) if scenes else None

    def as_taught(self, text: str) -> str | None:
        """Return a question in the demo model's wording, or None if unknown; for other models, return the text unchanged."""
        if not self.session.model.is_demo:
            return text
        question = parse(text)
        return None if question is None else question.text

    def _tick(self) -> None:
        """Report statistics and send keep-alives until the run stops. If a stop was requested, interrupt the model."""
        news, due = source_news(self.source), time.monotonic() + self.stats_every
        try:
            while not self._stopped.wait(min(1.0, max(0.05, due - time.monotonic()))):
                if time.monotonic() >= due:
                    due += self.stats_every
                    self.output.stats(self.stats(self._last))
                self._tell_manager()
                if (line := next(news)) is not None:
                    self.output.notice(line)
                if self.alone and is_gone(sys.stdout):
                    self.shutdown.ask()
        except (OSError, UserError):  # the main loop reports the same error
            self.stop()
        if self.shutdown.asked:
            self.session.cancel()  # the main loop may be waiting for the end of an answer

    def _tell_manager(self) -> None:
        """Send the service manager the status and, if the run is alive, a keep-alive.

        The run is alive if it has watched a frame or generated part of an answer since the last call, or if it waits for a
        source that is running or reconnecting. If a model or camera driver hangs, the manager restarts the process.
        """
        source, before = self.source, self._seen
        self._seen = self._steps, source.attempts
        self.notifier.send(f"STATUS={source.name}: {source.state.value}, {self.session.stats.frames:,} frames")
        lives = (source.live and source.state is State.RUNNING) or source.attempts != before[1]
        if self._steps != before[0] or (self._reading and lives):
            self.notifier.send(Notifier.ALIVE if self.started.is_set() else Notifier.STARTING)
