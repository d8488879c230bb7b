"""One watched camera of a service: source, session, run loop and thread, and what it tells those who listen."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgevlm.apps.credentials import mask_credentials, secret
from edgevlm.apps.forget import Forgotten, Span
from edgevlm.apps.run.clock import moment
from edgevlm.apps.run.frame_preparation import FramePreparation
from edgevlm.apps.run.loop import NEVER_TAUGHT, RunLoop, RunPlan
from edgevlm.apps.run.memory_view import MemoryWatch, view_memory
from edgevlm.apps.run.output import AnswerEvent, StatsEvent, evidence_fields, finite, wall_clock
from edgevlm.apps.run.process import Notifier
from edgevlm.apps.run.thumbnails import Thumbnails, as_jpeg
from edgevlm.apps.serve.config import CameraSettings, ServeConfig
from edgevlm.apps.sources import Frame, Source, SourceOptions, comes_to_an_end, open_source
from edgevlm.apps.watches.watcher import Watcher
from edgevlm.apps.watches.watches import Watches
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.chat import Turn
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.snapshots.encryption import SnapshotKey

WAITING = 64  # events that a listener may be behind before it is dropped
RETRY_S = 30.0  # from a source's failure to the next attempt
SAME_S = 5.0  # that two times of one frame may differ
PAUSE_S = 5.0  # that a frame which is being taken in may hold up a pause
RATES_S = 10.0  # over which frames watched and skipped are counted
WatchEvent = tuple[str, dict[str, Any]]


class Broadcast:
    """Events to any number of listeners in an event loop; one that does not keep up is dropped."""

    def __init__(self) -> None:
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[WatchEvent | None]]] = []

    def listen(self) -> asyncio.Queue[WatchEvent | None]:
        """A queue of events; None ends it. Call it in the event loop that reads it."""
        listener = asyncio.get_running_loop(), asyncio.Queue[WatchEvent | None](WAITING + 1)
        self._listeners.append(listener)
        return listener[1]

    def leave(self, queue: asyncio.Queue[WatchEvent | None]) -> None:
        self._listeners = [each for each in self._listeners if each[1] is not queue]

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        """From any thread."""
        for loop, queue in list(self._listeners):
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._put, queue, (kind, fields))

    def close(self) -> None:
        for loop, queue in list(self._listeners):
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._put, queue, None)

    def _put(self, queue: asyncio.Queue[WatchEvent | None], event: WatchEvent | None) -> None:
        if queue.qsize() < WAITING and event is not None:
            queue.put_nowait(event)
        elif queue.qsize() <= WAITING:
            self.leave(queue)
            queue.put_nowait(None)


class FrameRates:
    """Frames a second that are watched, and that are skipped because the model is busy, over the last RATES_S seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int, int]] = deque()  # seconds, frames watched and skipped since the source opened

    def count(self, now: float, watched: int, skipped: int) -> None:
        if self._counts and skipped < self._counts[-1][2]:  # the source was opened again
            self._counts.clear()
        self._counts.append((now, watched, skipped))
        while len(self._counts) > 2 and self._counts[1][0] <= now - RATES_S:
            self._counts.popleft()

    def clear(self) -> None:
        self._counts.clear()

    def __call__(self) -> tuple[float, float]:
        """Watched and skipped; nothing before there are two counts."""
        counts = list(self._counts)
        if len(counts) < 2:
            return 0.0, 0.0
        (since, *before), (now, *after) = counts[0], counts[-1]
        watched, skipped = ((late - early) / (now - since) for early, late in zip(before, after, strict=True))
        return watched, skipped


class SignsOfLife(Notifier):
    """Counts what a run of its own would report to a service manager."""

    def __init__(self) -> None:
        super().__init__({})
        self.count = 0

    def alive(self) -> None:
        self.count += 1

    def starting(self, seconds: float) -> None:
        self.count += 1


class Notes(Protocol):
    """A camera's journal, and what it has for a question."""

    def start(self) -> None: ...
    def close(self) -> None: ...
    def with_notes(self, question: str, window: Mapping[str, Any]) -> str: ...


class CameraStream:
    """A camera that is watched until :meth:`close`. ``events``: what happens, for listeners; ``notify``: called with notices.

    state: as a source's, or ``paused``. The thread that watches is its own; the model's work is done by the model's thread.
    """

    def __init__(
        self,
        name: str,
        settings: CameraSettings,
        model: Model,
        options: SourceOptions,
        folder: Path | None,
        config: ServeConfig,
        notify: Notify,
        watches: Watches,
        snapshots: str | None = None,
        key: SnapshotKey | None = None,
    ) -> None:
        """Opens source and session. Raises UserError, and nothing is left open.

        folder: of its pictures, and of its snapshots unless ``snapshots`` is their address; None keeps nothing on the disk.
        key: encrypts snapshots.
        """
        self.name, self.settings, self.model, self.folder = name, settings, model, folder
        self.events, self._notify = Broadcast(), notify
        self.stats: StatsEvent | None = None
        self.rates = FrameRates()
        self.problem: str | None = None  # why nothing is watched, where the source does not say it
        self.paused = False
        self.may_watch: Callable[[], bool] = lambda: True  # asked before each frame
        self.signs, self.pieces = SignsOfLife(), 0  # pieces: of answers
        self.hosts = options.hosts  # that its source may reach; None for any
        self.journal: Notes | None = None
        self._options, self._closing, self._wake = options, threading.Event(), threading.Event()
        self._idle = threading.Event()  # no frame is being taken in
        self._idle.set()
        self._address = secret(settings.source)
        self._source = self._open_source()
        self._writer: SnapshotWriter | None = None
        every, kept = config.state_every, config.thumbnails
        try:
            if (where := snapshots or folder) is not None:
                self._writer = SnapshotWriter(where, every, self.notice, mask_credentials(self._source.name), key)
            self.session = self._open_session(config.server.max_pictures)
            thumbnails = Thumbnails(folder, self.notice, every=every, cap=kept.megabytes << 20, days=kept.days)
        except BaseException:
            self._source.close()
            if self._writer is not None:
                self._writer.close()
            raise
        self.observer = MemoryWatch(self.session, thumbnails)
        self._since = 0.0
        self._jpeg = math.nan, b""  # time and picture of the newest frame that was asked for
        if self._writer is not None and self._writer.resumed is not None:
            time_s, written = self._writer.resumed.about["session"]["time_s"], self._writer.resumed.about["written"]
            self.observer.offset = written - time_s
            self._go_on_from(time_s, time.time() - written)
        self.watcher = Watcher(
            name, self.session, thumbnails, taught=lambda question: self.loop.as_taught(question), record=watches.record,
            last=watches.last, changed=lambda fields: self._watch_changed(fields, watches), notify=self.notice,
            replays=self._address == "demo" or comes_to_an_end(self._address, None),
        )  # fmt: skip
        self.loop = self._make_loop()
        self._thread = threading.Thread(target=self._watch, name=f"edgevlm-stream-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self.journal is not None:
            self.journal.start()

    @property
    def state(self) -> str:
        return "paused" if self.paused else "failed" if self.problem else self._source.state.value

    @property
    def resumed_at(self) -> float | None:
        """When the snapshot that it went on from was written, seconds since 1970; None where it began anew."""
        resumed = None if self._writer is None else self._writer.resumed
        return None if resumed is None else float(resumed.about["written"])

    @property
    def is_watched(self) -> bool:
        """Whether its thread reads the source: it is not paused, and does not wait to try a failed source again."""
        return not (self.paused or self.problem)

    def ask(self, question: str, turns: Sequence[Turn] = (), **sampling: Any) -> Answer | str:
        """The answer as it comes, or a text where the demo model was never taught the question.

        Raises UserError as :meth:`Session.ask` does.
        """
        taught = self.loop.as_taught(question)
        if taught is None and "logits_processor" in sampling:
            taught = question  # it must be one of the choices
        if taught is None:
            return NEVER_TAUGHT
        if not self.session.stats.frames:
            raise UserError("no frame has been watched yet; ask again in a moment")
        if self.journal is not None:
            taught = self.journal.with_notes(taught, sampling)
        return self.session.ask(taught, history=() if self.model.is_demo else turns, **sampling)

    def forget(self, span: Span) -> Forgotten:
        """Delete what was seen then: rows of the memory, snapshots of before, thumbnails. Raises UserError."""
        window, shown = span.of_stream(self.observer.offset), self.loop.frame
        if shown is not None and window.since <= shown.time_s <= window.until:
            self.loop.frame = None
        self._jpeg = math.nan, b""
        self.watcher.forget(window.since, window.until)
        rows = self.session.forget(*(None if math.isinf(each) else each for each in (window.since, window.until)))
        return {"rows": rows, "thumbnails": self.observer.thumbnails.delete(None, span.with_slack.since, span.with_slack.until)}

    def answered(self, question: str, answer: Answer) -> dict[str, Any]:
        """Tell the listeners of an answer, once it is finished; returns its :meth:`evidence`."""
        event = AnswerEvent(
            answer.time_s, question, answer.so_far.strip(), answer.token_ids, answer.ttft_ms, answer.tpot_ms,
            self.loop.truth(question, answer.time_s), evidence=answer.evidence,
        )  # fmt: skip
        evidence = self.evidence(answer)
        self.events.send("answer", described(event) | evidence)
        return evidence

    def evidence(self, answer: Answer) -> dict[str, Any]:
        """``evidence``, with wall clock and thumbnail of each moment, and ``evidence_held``; empty where nobody knows."""
        if answer.evidence is None:
            return {}
        fields: dict[str, Any] = evidence_fields(answer.evidence, self.observer.offset or None)
        for seen in fields["evidence"]:
            seen["jpeg_url"] = self._thumbnail_url(seen["frame"]) if self.has_picture(seen["frame"]) else None
        return fields

    def has_picture(self, frame: int, time: str | None = None) -> bool:
        """Whether there is a thumbnail of a frame; where its time is given, of one of that number that was taken then."""
        taken = self.observer.thumbnails.taken([frame]).get(frame)
        return taken is not None and (time is None or abs(taken.wall - moment(time)) < SAME_S)

    def describe(self) -> dict[str, Any]:
        """What ``GET /v1/streams/{name}`` answers."""
        stats, (watched, skipped) = self.stats, self.rates()
        return {
            "id": self.name,
            "object": "stream",
            "source": mask_credentials(self.settings.source),
            "model": mask_credentials(self.settings.model or "demo"),
            "policy": self.session.policy,
            "budget": self.session.budget,
            "fps": self.settings.fps,
            "frames_watched": self.session.stats.frames,
            "watched_fps": round(watched, 3),
            "skipped_fps": round(skipped, 3),
            "state": self.state,
            "problem": None if self.paused else self.problem or mask_credentials(self._source.problem or "") or None,
            "time_s": finite(self.session.time_s),
            "frame_time": self.wall(self.session.time_s),
            "stats": None if stats is None else described(stats),
        }

    def wall(self, time_s: float) -> str | None:
        """Wall clock of a time of the stream, RFC 3339; None before the first frame."""
        return wall_clock(self.observer.offset + time_s) if self.observer.offset else None

    def memory(self) -> dict[str, Any]:
        """What is held, frame by frame: ``patches`` has one hexadecimal digit a token, the fraction of layers and heads."""
        view = view_memory(self.session)
        numbers, by_group, frames = view.frames.tolist(), view.patches.mean(axis=2), []
        taken = self.observer.thumbnails.taken(numbers)
        for number, fraction, groups, patches in zip(numbers, view.fractions, by_group, view.all_layers, strict=True):
            when = taken.get(number)
            frames.append({
                "frame": number,
                "time_s": None if when is None else when.time_s,
                "time": None if when is None else wall_clock(when.wall),
                "fraction": round(float(fraction), 4),
                "layer_fractions": [round(float(each), 4) for each in groups],
                "patches": "".join(f"{digit:x}" for digit in np.ceil(15 * patches - 1e-6).astype(int).tolist()),
                "thumbnail_url": None if when is None else self._thumbnail_url(number),
            })  # fmt: skip
        return {
            "object": "memory", "stream": self.name, "policy": view.policy, "budget": view.budget,
            "tokens": view.tokens, "cache_bytes": self.session.stats.cache_bytes, "frames_watched": view.watched,
            "frames_waiting": view.waiting, "grid": list(self.model.bundle.vision.grid),
            "layer_groups": [list(each) for each in view.groups], "frames": frames,
        }  # fmt: skip

    def _thumbnail_url(self, frame: int) -> str:
        return f"/v1/streams/{self.name}/thumbnails/{frame}.jpg"

    def jpeg(self) -> bytes | None:
        """The newest frame that was watched; None before the first."""
        frame, (time_s, jpeg) = self.loop.frame, self._jpeg
        if frame is None:
            return None
        if frame.time_s != time_s:  # it is encoded once, however many look at it
            jpeg = as_jpeg(frame.image)
            self._jpeg = frame.time_s, jpeg
        return jpeg

    def pause(self) -> None:
        """Let go of the camera, behind the frame that is being taken in; the memory stays and can be asked."""
        self.paused = True
        self.loop.stop()
        self._source.close()
        self._idle.wait(PAUSE_S)
        self.events.send("state", {"state": self.state, "problem": None})

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self._wake.set()

    def close(self) -> None:
        """End it, with a last snapshot."""
        self._closing.set()
        self._wake.set()
        if self.journal is not None:
            self.journal.close()
        self.loop.stop()
        self._source.close()
        self.session.cancel()
        if self._thread.ident is not None:
            self._thread.join()
        self.watcher.close()
        self.session.close()
        self.observer.close()
        self.events.close()

    def _watch_changed(self, fields: dict[str, Any], watches: Watches) -> None:
        self.events.send("watch", {"time": wall_clock(), **fields})
        watches.announce()

    def stats_line(self, stats: StatsEvent) -> None:
        self.stats = stats
        self.rates.count(time.monotonic(), stats.frames, stats.drops.get("replaced", 0))
        self.events.send("stats", {**described(stats), "skipped_fps": round(self.rates()[1], 3)})

    def notice(self, text: str) -> None:
        line = mask_credentials(text)
        self._notify(f"{self.name}: {line}")
        self.events.send("notice", {"text": line})

    def _watch(self) -> None:
        reopen = False
        while not self._closing.is_set():
            try:
                if reopen:
                    self._reopen()
                reopen = True
                self._idle.clear()
                if not self.paused and not self._closing.is_set():
                    self.loop()
                ended = "the source has ended" if self.may_watch() else "another node may watch it"
                self.problem = None if self.paused or self._wake.is_set() else ended
            except UserError as error:
                self.problem = mask_credentials(str(error))
            except Exception as error:
                self.problem = f"unexpected {type(error).__name__}: {mask_credentials(str(error))}"
            self.rates.clear()
            self._idle.set()
            if not self._closing.is_set():
                self._tell_state()
            if self.paused:
                self._source.close()
            else:
                self._wake.wait(None if comes_to_an_end(self._address, None) else RETRY_S)
            self._wake.clear()
            while self.paused and not self._closing.is_set():
                self._wake.wait()
                self._wake.clear()
        self._source.close()

    def _tell_state(self) -> None:
        self.events.send("state", {"state": self.state, "problem": self.problem})

    def _reopen(self) -> None:
        """Open the source again behind the session's time. Raises UserError."""
        self._source.close()
        self._source = self._open_source()
        self._go_on_from(self.session.time_s, time.time() - self.observer.offset - self.session.time_s)
        self.loop = self._make_loop()
        self.problem = None
        self._tell_state()

    def _open_source(self) -> Source:
        return open_source(self._address, None, self._options)

    def _open_session(self, pictures: int) -> Session:
        wanted = self.settings
        session = Session.open(
            self.model, policy=wanted.policy or "auto", budget=None if wanted.policy == "full" else wanted.budget,
            append=wanted.append or "auto", encode=wanted.encode or "auto", state=self._writer,
            text_budget=replace(TextBudget.fitting(self.model.bundle.limit), pictures=pictures),
        )  # fmt: skip
        session.notify, session.rate = self.notice, self._options.fps
        return session

    def _go_on_from(self, time_s: float, away_s: float) -> None:
        """A recording goes on behind what was watched of it; a camera's clock has gone on for ``away_s``."""
        if not self._source.skip(time_s):
            self._since = time_s + max(0.0, away_s)

    def _make_loop(self) -> RunLoop:
        self._source.prepare = FramePreparation(self.session.prepare)
        return RunLoop(
            self.session,
            self._source,
            LoopOutput(self),
            RunPlan(since=self._since),
            observer=Observers(self.observer, self.watcher),
            notifier=self.signs,
            alone=False,
            may_watch=lambda: self.may_watch(),
        )


class Observers:
    """Both see each frame that the session has taken in. The stream closes them, and keeps its session."""

    def __init__(self, memory: MemoryWatch, watcher: Watcher) -> None:
        self._memory, self._watcher = memory, watcher

    def watch(self, frame: Frame) -> None:
        self._memory.watch(frame)
        self._watcher.watch(frame)

    def close(self) -> None: ...


class LoopOutput:
    """Where a stream's run loop writes; answers go to those who asked."""

    def __init__(self, stream: CameraStream) -> None:
        self.stats = self.summary = stream.stats_line
        self.notice = stream.notice

    def answer(self, answer: AnswerEvent) -> None: ...
    def piece(self, text: str) -> None: ...


def described(event: AnswerEvent | StatsEvent) -> dict[str, Any]:
    """An event as JSON has it, with the time."""
    left_out = ("evidence", "offset")
    fields = {name: finite(value) for name, value in asdict(event).items() if value is not None and name not in left_out}
    return {"time": wall_clock(), **fields}


def stream_options(options: SourceOptions, settings: CameraSettings) -> SourceOptions:
    """How a service opens a source: it waits for cameras, and plays recordings and the demo at their own pace."""
    return replace(options, fps=settings.fps or options.fps, wait=True, realtime=True)
