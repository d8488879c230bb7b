"""Watch one camera of a service: its source, session, run loop, thread, journal and listeners."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.forget import MARK, Forgotten
from edgevlm.apps.journal import Journal, Line, with_notes
from edgevlm.apps.run.clock import Span, moment
from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.memory_view import MemoryWatch, view_memory
from edgevlm.apps.run.output import AnswerEvent, StatsEvent, evidence_fields, finite, wall_clock
from edgevlm.apps.run.process import Notifier
from edgevlm.apps.run.thumbnails import Thumbnails, as_jpeg
from edgevlm.apps.serve.config import PICTURES, CameraSettings, JournalSettings, ServeConfig
from edgevlm.apps.sources import Frame, Source, SourceOptions, comes_to_an_end, open_source
from edgevlm.apps.watches.watcher import Watcher
from edgevlm.apps.watches.watches import Watches
from edgevlm.errors import UserError
from edgevlm.progress import Lost, Notify
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.chat import Dialogue
from edgevlm.runtime.instant import Instant
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.snapshots.directory import SnapshotKey
from edgevlm.runtime.snapshots.writer import written_at
from edgevlm.runtime.taught import never_taught

WAITING = 64  # a listener with this many unread events is dropped
RETRY_S = 30.0
SAME_S = 5.0  # thumbnails whose times differ by less than this show the same frame
PAUSE_S = 5.0
RATES = 11  # frame rates are computed over this many per-second statistics
PROMPT = "Describe in one short sentence what is happening now."
DEMO_PROMPT, BEFORE = "what left last?", "how many objects are there now?"  # BEFORE is asked until an object has left
NOTES = 32
SOONEST = 0.1  # after large changes, the next journal line may come after this fraction of the interval
Event = tuple[str, dict[str, Any]]


class Broadcast:
    """Sends events to listeners in any event loop, and drops listeners that do not keep up."""

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Queue[Event | None], asyncio.AbstractEventLoop] = {}

    def listen(self) -> asyncio.Queue[Event | None]:
        """Return a queue of events that ends with None. Call this method in the event loop that reads the queue."""
        queue = asyncio.Queue[Event | None]()
        self._listeners[queue] = asyncio.get_running_loop()
        return queue

    def leave(self, queue: asyncio.Queue[Event | None]) -> None:
        self._listeners.pop(queue, None)

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        self._send((kind, fields))

    def close(self) -> None:
        self._send(None)

    def _send(self, event: Event | None) -> None:
        for queue, loop in list(self._listeners.items()):
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._put, queue, event)

    def _put(self, queue: asyncio.Queue[Event | None], event: Event | None) -> None:
        if queue in self._listeners:
            is_last = event is None or queue.qsize() >= WAITING
            queue.put_nowait(None if is_last else event)
            if is_last:
                self.leave(queue)


class SignsOfLife(Notifier):
    """Counts a run loop's keep-alive messages instead of sending them to the service manager."""

    def __init__(self) -> None:
        super().__init__({})
        self.count = 0

    def send(self, message: str) -> None:
        self.count += message in (self.ALIVE, self.STARTING)


class Owner(Protocol):
    """The attributes of a service that its cameras use."""

    config: ServeConfig
    notify: Notify
    watches: Watches
    hooks: Any
    state_key: SnapshotKey | None

    @property
    def journal(self) -> Journal | None: ...
    def model(self, name: str) -> Model: ...


class CameraStream:
    """A camera, watched by its own thread until :meth:`close`.

    ``ends``: whether the source comes to an end, as a video file does.
    ``problem``: the reason why watching stopped, if any; the source's own ``problem`` may give another reason.
    ``hosts``: the hosts that the source may reach, or None for any host.
    """

    def __init__(
        self, service: Owner, name: str, settings: CameraSettings, options: SourceOptions, folder: Path | None, paused: bool
    ) -> None:
        """Open the source and the session. If opening fails, the source and the snapshot writer are closed.

        ``folder``: where to keep thumbnails and snapshots, or None to keep nothing on the disk.
        """
        self.name, self.settings, self.folder, self.paused = name, settings, folder, paused
        self.model = model = service.model(settings.model or "demo")
        self.events, self.signs, self.pieces, self.hosts = Broadcast(), SignsOfLife(), 0, options.hosts
        self.last: StatsEvent | None = None
        self.problem: str | None = None
        self._service, self._options = service, options
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=RATES)  # time, frames watched, frames skipped
        self._closing, self._wake, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._idle.set()  # no frame is being watched
        self._address = settings.address()
        self.ends = comes_to_an_end(self._address, None)
        self._source = self._open_source()
        self._writer: SnapshotWriter | None = None
        config, watches = service.config, service.watches
        every, kept = config.state_every, config.thumbnails
        try:
            if folder is not None:
                where = service.hooks.camera_address(service, name) or folder
                self._writer = SnapshotWriter(
                    where, every, self.notice, mask_credentials(self._source.name), service.state_key, begin_again=True
                )
            self.session = Session.open(
                model, policy=settings.policy or "auto", budget=None if settings.policy == "full" else settings.budget,
                append=settings.append or "auto", encode=settings.encode or "auto", state=self._writer,
                text_budget=replace(
                    TextBudget.fitting(model.bundle.limit), pictures=min(PICTURES, config.server.max_pictures),
                    most=config.server.max_question_tokens,
                ),
            )  # fmt: skip
            thumbnails = Thumbnails(folder, self.notice, every=every, cap=kept.megabytes << 20, days=kept.days)
        except BaseException:
            self._source.close()
            if self._writer is not None:
                self._writer.close()
            raise
        self.session.notify, self.session.rate = self.notice, options.fps
        self.observer = MemoryWatch(self.session, thumbnails)
        self._since, self._jpeg = 0.0, (math.nan, b"")  # _jpeg: time and JPEG of the frame last requested
        if self._writer is not None and self._writer.resumed is not None:
            about = self._writer.resumed.about
            self.observer.seen, self.observer.offset = written_at(about), about["written"] - about["session"]["time_s"]
            self._go_on()
        self.watcher = Watcher(
            name, self.session, thumbnails, taught=lambda question: self.loop.as_taught(question), record=watches.record,
            last=watches.last, changed=self._watch_changed, notify=self.notice, replays=self._address == "demo" or self.ends,
            label=settings.name,
        )  # fmt: skip
        self.loop = self._make_loop()
        self.journal = None if service.journal is None else JournalWriter(self, service.journal, config.journal)
        self._thread = threading.Thread(target=self._run, name=f"edgevlm-stream-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self.journal is not None:
            self.journal.start()

    @property
    def state(self) -> str:
        return "paused" if self.paused else "failed" if self.problem else self._source.state.value

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def resumed_at(self) -> float | None:
        """The time at which the resumed snapshot was written, in seconds since 1970; None if no snapshot was resumed."""
        resumed = None if self._writer is None else self._writer.resumed
        return None if resumed is None else float(resumed.about["written"])

    def rates(self) -> tuple[float, float]:
        """Return two rates per second, over ten seconds: watched frames, and frames skipped because the model was busy."""
        if len(counts := list(self._counts)) < 2:
            return 0.0, 0.0
        (since, watched, skipped), (now, watched_now, skipped_now) = counts[0], counts[-1]
        return (watched_now - watched) / (now - since), (skipped_now - skipped) / (now - since)

    def ask(self, asked: Dialogue, **sampling: Any) -> Answer | str:
        """Start an answer and return it, or a message if the demo model does not know the question. Raises UserError."""
        taught = self.loop.as_taught(asked.text)
        if taught is None and "logits_processor" in sampling:
            taught = asked.text  # the answer must be one of the choices
        if taught is None:
            return never_taught(asked.text)
        if not self.session.stats.frames:
            raise UserError("no frame has been watched yet; ask again in a moment")
        if self.journal is not None:
            taught = self.journal.with_notes(taught, sampling)
        return self.session.ask(asked.with_text(taught), **sampling)

    def answered(self, question: str, answer: Answer) -> dict[str, Any]:
        """Send a finished answer to the listeners and return its :meth:`evidence`."""
        event = AnswerEvent(
            answer.time_s, question, answer.so_far.strip(), answer.token_ids, answer.ttft_ms, answer.tpot_ms,
            self.loop.truth(question, answer.time_s), evidence=answer.evidence,
        )  # fmt: skip
        evidence = self.evidence(answer)
        self.events.send("answer", described(event) | evidence)
        return evidence

    def evidence(self, answer: Answer) -> dict[str, Any]:
        """Return the JSON fields that show on which moments an answer is based, or no fields if the moments are unknown."""
        if answer.evidence is None and self.loop.fits:
            return {}
        fields: dict[str, Any] = evidence_fields(answer.evidence, self.observer.offset or None, self.loop.fits)
        return fields | {"evidence": [seen | {"jpeg_url": self.picture_url(seen["frame"])} for seen in fields["evidence"]]}

    def picture_url(self, frame: int, time: str | None = None) -> str | None:
        """Return the path of a frame's thumbnail, or None if it is missing or was not taken at ``time``."""
        taken = self.observer.thumbnails.taken([frame]).get(frame)
        is_there = taken is not None and (time is None or abs(taken.wall - moment(time)) < SAME_S)
        return f"/v1/streams/{self.name}/thumbnails/{frame}.jpg" if is_there else None

    def forget(self, span: Span) -> Forgotten:
        """Delete the cache rows and thumbnails of a period, and replace all snapshots with a new snapshot. Raises UserError."""
        window, shown = span.with_slack.of_stream(self.observer.offset), self.loop.frame
        if shown is not None and window.since <= shown.time_s <= window.until:
            self.loop.frame = None
        self._jpeg = math.nan, b""
        self.watcher.forget(window.since, window.until)
        rows = self.session.forget(*(None if math.isinf(each) else each for each in (window.since, window.until)))
        return {"rows": rows, "thumbnails": self.observer.thumbnails.delete(None, span.with_slack.since, span.with_slack.until)}

    def describe(self) -> dict[str, Any]:
        watched, skipped = self.rates()
        return {
            "id": self.name, "object": "stream", "name": self.settings.name or self.name,
            "source": mask_credentials(self.settings.source),
            "model": mask_credentials(self.settings.model or "demo"), "policy": self.session.policy,
            "budget": self.session.budget, "fps": self.settings.fps, "frames_watched": self.session.stats.frames,
            "watched_fps": round(watched, 3), "skipped_fps": round(skipped, 3), "state": self.state,
            "problem": None if self.paused else self.problem or mask_credentials(self._source.problem or "") or None,
            "time_s": finite(self.session.time_s), "frame_time": self.wall(self.session.time_s),
            "stats": None if self.last is None else described(self.last),
        }  # fmt: skip

    def wall(self, time_s: float) -> str | None:
        """Convert a stream time to wall-clock time in RFC 3339. Returns None before the first frame."""
        return wall_clock(self.observer.offset + time_s) if self.observer.offset else None

    def memory(self) -> dict[str, Any]:
        """Describe each frame in memory, as in ``GET /v1/streams/{name}/memory``."""
        view, frames = view_memory(self.session), []
        numbers = view.frames.tolist()
        taken = self.observer.thumbnails.taken(numbers)
        parts = zip(numbers, view.fractions, view.patches.mean(axis=2), view.all_layers, strict=True)
        for number, fraction, groups, patches in parts:
            when = taken.get(number)
            frames.append({
                "frame": number, "time_s": when and when.time_s, "time": when and wall_clock(when.wall),
                "fraction": round(float(fraction), 4), "layer_fractions": [round(float(each), 4) for each in groups],
                "patches": "".join(f"{digit:x}" for digit in np.ceil(15 * patches - 1e-6).astype(int).tolist()),
                "thumbnail_url": when and f"/v1/streams/{self.name}/thumbnails/{number}.jpg",
            })  # fmt: skip
        return {
            "object": "memory", "stream": self.name, "policy": view.policy, "budget": view.budget,
            "tokens": view.tokens, "cache_bytes": self.session.stats.cache_bytes, "frames_watched": view.watched,
            "frames_waiting": view.waiting, "grid": list(self.model.bundle.vision.grid),
            "layer_groups": [list(each) for each in view.groups], "frames": frames,
        }  # fmt: skip

    def jpeg(self) -> bytes | None:
        if (frame := self.loop.frame) is None:
            return None
        time_s, jpeg = self._jpeg
        if frame.time_s != time_s:  # each frame is encoded only once, however many clients request it
            jpeg = as_jpeg(frame.image)
            self._jpeg = frame.time_s, jpeg
        return jpeg

    def pause(self) -> None:
        """Release the camera after the frame in progress. The camera's memory is kept and can still answer questions."""
        self.paused = True
        self.loop.stop()
        self._source.close()
        self._idle.wait(PAUSE_S)
        self._send_state()

    def resume(self) -> None:
        if self.paused:
            (self._service.hooks.camera_folder(self._service, self.name) / MARK).unlink(missing_ok=True)
            self.paused = False
            self._wake.set()

    def close(self) -> None:
        """Close the camera after writing a last snapshot."""
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

    def notice(self, text: str) -> None:
        line = mask_credentials(text)
        self._service.notify(type(text)(f"{self.name}: {line}"))
        self.events.send("notice", {"text": line})

    def stats(self, stats: StatsEvent) -> None:
        self.last, skipped = stats, stats.drops.get("replaced", 0)
        if self._counts and skipped < self._counts[-1][2]:  # the source was reopened
            self._counts.clear()
        self._counts.append((time.monotonic(), stats.frames, skipped))
        self.events.send("stats", {**described(stats), "skipped_fps": round(self.rates()[1], 3)})

    def summary(self, stats: StatsEvent, span: str) -> None:
        self.stats(stats)

    def answer(self, answer: AnswerEvent) -> None: ...
    def piece(self, text: str) -> None: ...

    def watch(self, frame: Frame) -> None:
        self.observer.watch(frame)
        self.watcher.watch(frame)

    def _watch_changed(self, fields: dict[str, Any]) -> None:
        self.events.send("watch", {"time": wall_clock(), **fields})
        self._service.watches.announce()

    def _send_state(self) -> None:
        self.events.send("state", {"state": self.state, "problem": None if self.paused else self.problem})

    def _run(self) -> None:
        again = False
        while not self._closing.is_set():
            try:
                if again:
                    self._open_again()
                again = True
                self._idle.clear()
                if not self.paused and not self._closing.is_set():
                    self.loop()
                elsewhere = not self._service.hooks.may_watch(self.name)
                ended = "another node may be watching the camera" if elsewhere else "the source has ended"
                self.problem = None if self.paused or self._wake.is_set() else ended
            except UserError as error:
                self.problem = mask_credentials(str(error))
            except Exception as error:
                self.problem = f"unexpected {type(error).__name__}: {mask_credentials(str(error))}"
            self._counts.clear()
            self._idle.set()
            if not self._closing.is_set():
                self._send_state()
            if self.paused:
                self._source.close()
            else:
                self._wake.wait(None if self.ends else RETRY_S)
            self._wake.clear()
            while self.paused and not self._closing.is_set():
                self._wake.wait()
                self._wake.clear()
        self._source.close()

    def _open_again(self) -> None:
        """Reopen the source at the session's current time. Raises UserError."""
        self._source.close()
        self._source = self._open_source()
        self._go_on()
        self.loop = self._make_loop()
        self.problem = None
        self._send_state()

    def _open_source(self) -> Source:
        return open_source(self._address, None, self._options)

    def _go_on(self) -> None:
        """Skip to a video file's first unwatched frame, or advance a live camera's clock by the time since its last frame."""
        if not self._source.skip(self.session.time_s):
            self._since = self.session.time_s + Instant.now().since(self.observer.seen)

    def _make_loop(self) -> RunLoop:
        self._source.prepare = self.session.prepare
        return RunLoop(
            self.session, self._source, self, RunPlan(since=self._since), observer=self, notifier=self.signs, alone=False,
            may_watch=lambda: self._service.hooks.may_watch(self.name),
        )  # fmt: skip


class JournalWriter(threading.Thread):
    """A thread that asks a stream for journal lines at regular intervals, and earlier after large changes."""

    def __init__(self, stream: CameraStream, journal: Journal, settings: JournalSettings) -> None:
        super().__init__(name=f"edgevlm-journal-{stream.name}", daemon=True)
        self._stream, self._journal, self._settings = stream, journal, settings
        self._closing = threading.Event()

    def close(self) -> None:
        """Stop writing journal lines, without waiting. A journal line in progress is cancelled when the session closes."""
        self._closing.set()

    def with_notes(self, question: str, window: Mapping[str, Any]) -> str:
        """Put a period's journal lines in front of a question, if they share words with it and fit in ``context`` tokens."""
        stream, most = self._stream, self._settings.context
        if not most or stream.model.is_demo:
            return question
        encode, offset, chosen = stream.model.encode, stream.observer.offset, list[Line]()
        most += len(encode(question))
        since, until = (None if window.get(name) is None else offset + window[name] for name in ("since", "until"))
        for line in self._journal.query(question, since, until, stream.name, NOTES, any_word=True):
            longer = with_notes(question, [*chosen, line])
            with suppress(UserError):
                stream.session.check(longer)
                if len(encode(longer)) <= most:
                    chosen.append(line)
        return with_notes(question, chosen)

    def run(self) -> None:
        if not self._settings.every:
            return
        stream, every = self._stream, 60 * self._settings.every
        last, seen, appended, problem = time.monotonic() - every, 0, 0, ""
        while not self._closing.wait(SOONEST * every):
            frames, tokens = stream.session.stats.frames, stream.session.stats.memory.tokens_appended
            grown = (tokens - appended) / stream.model.bundle.vision.tokens_per_frame
            due = time.monotonic() - last >= every or grown >= self._settings.changed
            if due and frames > seen and not stream.paused:
                last, seen, appended = time.monotonic(), frames, tokens
                try:
                    self._write()
                except UserError as error:
                    if str(error) != problem and not self._closing.is_set():
                        stream.notice(Lost(f"journal line not written: {error}"))
                    problem = str(error)

    def _write(self) -> None:
        stream, session, prompt = self._stream, self._stream.session, self._settings.prompt or PROMPT
        if stream.model.is_demo and self._settings.prompt is None:
            prompt = BEFORE if stream.loop.truth(DEMO_PROMPT, session.time_s) is None else DEMO_PROMPT
        taught = stream.loop.as_taught(prompt)
        if taught is None:
            raise UserError(never_taught(prompt))
        forgotten = self._journal.forgotten
        answer = session.ask(taught, max_tokens=min(self._settings.max_tokens, session.text_budget.answer))
        text = " ".join(answer.text.split())
        if text and not answer.cancelled:
            said, evidence = f"{prompt} {text}" if prompt.endswith("?") else text, stream.evidence(answer).get("evidence", [])
            line = Line(stream.name, stream.observer.offset + answer.time_s, said, evidence)
            self._journal.add(line, forgotten)
            stream.events.send("journal", line.json())


def described(event: AnswerEvent | StatsEvent) -> dict[str, Any]:
    left_out = ("others", "evidence", "offset", "fits")
    given = asdict(event) if isinstance(event, AnswerEvent) else dict(event)
    fields = {name: finite(value) for name, value in given.items() if value is not None and name not in left_out}
    return {"time": wall_clock(), **fields}


def stream_options(options: SourceOptions, settings: CameraSettings) -> SourceOptions:
    """Return the source options of a server: wait for cameras, and play video files and the demo in real time."""
    return replace(options, fps=settings.fps or options.fps, wait=True, realtime=True)
