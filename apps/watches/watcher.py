"""Ask the watches of one camera, and report when they open and close."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from edgevlm.apps.run.change_gate import ChangeGate
from edgevlm.apps.run.output import evidence_fields, wall_clock
from edgevlm.apps.run.thumbnails import Thumbnails, as_jpeg, shrunk
from edgevlm.apps.sources import Frame
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.watch import Watch, WatchState
from edgevlm.errors import FieldError, UserError
from edgevlm.progress import Notify
from edgevlm.runtime.evidence import Evidence, Moment
from edgevlm.runtime.sampling import Classified
from edgevlm.runtime.session import Session
from edgevlm.runtime.taught import never_taught

PICTURE = 640
FRAMES = 16  # number of newest frames kept to find the frame that an answer is about
COME_S = 2.0
EARLY = 0.001  # a watch may be asked early by this fraction of its `every`


@dataclass(slots=True)
class SeenFrame:
    number: int
    wall: float
    frame: Frame


@dataclass(slots=True)
class Tracked(WatchState):
    """The state of a watch on one camera.

    ``closed``: when the watch last closed before a restart, in seconds since 1970. ``judged``: when a video file
    is played again, the watch is asked only after this stream time.
    """

    opened: float = 0.0
    closed: float | None = None
    judged: float | None = None
    paused: bool = False
    picture_changed: bool = False
    gate: ChangeGate = field(default_factory=ChangeGate)
    reported: tuple[Any, ...] = ()


class Watcher:
    """Asks the watches of one camera in a separate thread.

    The run loop passes frames to :meth:`watch`. ``taught``: returns a question in the words with which the model was trained,
    or None if the model was not trained on it. ``last``: returns the newest recorded event of a camera's watch. ``changed``:
    called with each watch whose state or probability changed. ``replays``: whether a restart plays the source again; events
    that were already sent are then not sent again.
    """

    def __init__(
        self,
        camera: str,
        session: Session,
        thumbnails: Thumbnails,
        *,
        taught: Callable[[str], str | None],
        record: Callable[[Watch, WatchEvent, Sequence[bytes | None]], object],
        last: Callable[[str, str], WatchEvent | None] = lambda camera, watch: None,
        changed: Callable[[dict[str, Any]], object] = lambda fields: None,
        notify: Notify = lambda line: None,
        replays: bool = False,
        label: str | None = None,
    ) -> None:
        self.label = label  # the camera's displayed name
        self.camera, self._session, self._thumbnails, self._replays = camera, session, thumbnails, replays
        self._taught, self._record, self._last, self._changed, self._notify = taught, record, last, changed, notify
        self._tracked: dict[str, Tracked] = {}
        self._lock = threading.RLock()  # a lock for the watches and their states
        self._frames: deque[SeenFrame] = deque(maxlen=FRAMES)
        self._fresh = threading.Condition()
        self._waiting = self._closing = False
        self._problem = ""  # why the watches could not be asked last time
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Start asking a watch's question, unless its name is in use. Raises the same FieldError as :meth:`check`."""
        self.check(watch)
        with self._lock:
            if watch.name in self._tracked:
                return
            self._tracked[watch.name] = tracked = Tracked(watch)
            if (last := self._last(self.camera, watch.name)) is not None:
                tracked.opened, tracked.is_open = last.opened, last.state == "open"
                tracked.closed = None if tracked.is_open else last.time
                if self._replays:
                    tracked.judged = max((moment["until_s"] for moment in last.evidence), default=None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._ask, name=f"edgevlm-watches-{self.camera}", daemon=True)
                self._thread.start()

    def check(self, watch: Watch) -> None:
        """Raise FieldError if a watch cannot be asked on this camera."""
        try:
            self._session.check(self._worded(watch), watch.choices)
        except UserError as error:
            raise FieldError("question", str(error)) from None

    def _worded(self, watch: Watch) -> str:
        worded = self._taught(watch.question)
        if worded is None:
            raise UserError(never_taught(watch.question))
        return worded

    def remove(self, name: str) -> None:
        """Stop asking a watch, and close it if it is open."""
        with self._lock:
            if (tracked := self._tracked.pop(name, None)) is None:
                return
            self._end(tracked)
        self._report_changes([tracked])

    def end(self) -> None:
        """Close this camera's open watches because the camera is removed."""
        with self._lock:
            for tracked in self._tracked.values():
                self._end(tracked)

    def pause(self, name: str, paused: bool) -> None:
        """Stop asking a watch until it is resumed, and close it if it is open."""
        with self._lock:
            if (tracked := self._tracked.get(name)) is None:
                return
            tracked.paused = paused
            if paused:
                self._end(tracked)
        self._report_changes([tracked])

    def states(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {name: self._fields(tracked) for name, tracked in self._tracked.items()}

    def watch(self, frame: Frame) -> None:
        with self._fresh:
            self._frames.append(SeenFrame(self._session.stats.frames - 1, time.time(), frame))
            self._waiting = True
            self._fresh.notify_all()

    def forget(self, since: float, until: float) -> None:
        """Delete the stored frames of a period of stream time, in seconds."""
        with self._fresh:
            kept = [seen for seen in self._frames if not since <= seen.frame.time_s <= until]
            self._frames = deque(kept, maxlen=FRAMES)

    def close(self) -> None:
        """Stop asking watches, without closing open watches."""
        with self._fresh:
            self._closing = True
            self._fresh.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _ask(self) -> None:
        while True:
            with self._fresh:
                self._fresh.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                self._waiting = False
            problem = ""
            try:
                self.ask()
            except Exception as error:  # keep watching: the next frame may work
                problem = str(error) if isinstance(error, UserError) else f"unexpected {type(error).__name__}: {error}"
            if problem not in ("", self._problem) and not self._closing:
                self._notify(f"watches: {problem}")
            self._problem = problem

    def ask(self) -> None:
        """Ask each watch that is due. Raises the same UserError as :meth:`Session.classify`."""
        frames, found = self._frames, list[Classified]()
        if not frames:  # forget has dropped all frames
            return
        with self._lock:
            all_of_them = list(self._tracked.values())
            due = [tracked for tracked in all_of_them if self._due(tracked, frames[-1])]
        due.sort(key=lambda tracked: -1.0 if tracked.asked is None else tracked.asked)
        if due:
            questions = [(self._worded(tracked.watch), tracked.watch.choices) for tracked in due]
            found = self._session.classify(questions, watch=True)
            seen = self._seen(found[0].time_s)
            with self._lock:
                for tracked, one in zip(due, found, strict=False):
                    if seen is not None and self._tracked.get(tracked.watch.name) is tracked and not tracked.paused:
                        self._observe(tracked, one, seen)
        if len(found) < len(due):  # ask the remaining watches in the next round
            with self._fresh:
                self._waiting = True
        self._report_changes(all_of_them)

    def _due(self, tracked: Tracked, newest: SeenFrame) -> bool:
        watch, time_s = tracked.watch, newest.frame.time_s
        if tracked.paused or (tracked.judged is not None and time_s <= tracked.judged):
            return False
        if not watch.asks(datetime.now()):
            self._end(tracked)
            return False
        if tracked.asked is not None and 0 <= time_s - tracked.asked < watch.every * (1 - EARLY):
            return False
        if watch.changed:
            tracked.picture_changed |= tracked.gate(newest.frame.image)
        return tracked.picture_changed or not watch.changed or tracked.is_changing

    def _observe(self, tracked: Tracked, one: Classified, seen: SeenFrame) -> None:
        probability = sum(one.probabilities[choice] for choice in tracked.watch.answers)
        if tracked.closed is not None:  # convert the wall clock to stream time
            tracked.since, tracked.closed = one.time_s - max(0.0, time.time() - tracked.closed), None
        tracked.picture_changed, tracked.judged = False, None
        if tracked.observe(one.time_s, probability):
            if tracked.is_open:
                tracked.opened = seen.wall
            self._report(tracked, seen, probability, one)

    def _end(self, tracked: Tracked) -> None:
        probability = tracked.probability or 0.0
        if tracked.end(self._session.time_s):
            self._report(tracked, self._frames[-1] if self._frames else None, probability)

    def _report(self, tracked: Tracked, seen: SeenFrame | None, probability: float, one: Classified | None = None) -> None:
        moments = () if one is None else one.looked.evidence().moments
        if seen is not None:  # the first moment is the frame about which the watch was asked
            at = (seen.number, seen.number, seen.frame.time_s, seen.frame.time_s)
            first = [each for each in moments if each.frame <= seen.number <= each.last_frame]
            moments = (*(first or [Moment(*at, 0.0, (0.0, 0.0, 1.0, 1.0))]), *(each for each in moments if each not in first))
        wall, time_s = (time.time(), self._session.time_s) if seen is None else (seen.wall, seen.frame.time_s)
        evidence: Any = evidence_fields(Evidence(moments, None), wall - time_s)["evidence"]
        pictures = [self._thumbnails.jpeg(moment.frame) for moment in moments]
        if seen is not None:
            pictures[0] = as_jpeg(shrunk(seen.frame.image, PICTURE))
        event = WatchEvent(
            self.camera, tracked.watch.name, "open" if tracked.is_open else "close", wall, probability,
            tracked.opened or wall, evidence, tracked.watch.in_words,
        )  # fmt: skip
        self._record(tracked.watch, event, pictures)

    def _seen(self, time_s: float) -> SeenFrame | None:
        with self._fresh:
            self._fresh.wait_for(lambda: self._closing or not self._frames or self._frames[-1].frame.time_s >= time_s, COME_S)
            before = (each for each in reversed(self._frames) if each.frame.time_s <= time_s)
            return next(before, self._frames[-1] if self._frames else None)

    def _fields(self, tracked: Tracked) -> dict[str, Any]:
        return {
            "watch": tracked.watch.name, "camera": self.camera, "state": "open" if tracked.is_open else "closed",
            "answer": tracked.answer, "probability": None if tracked.probability is None else round(tracked.probability, 4),
            "opened": wall_clock(tracked.opened) if tracked.opened else None, "paused": tracked.paused,
        }  # fmt: skip

    def _report_changes(self, changed: Sequence[Tracked]) -> None:
        for tracked in changed:
            with self._lock:
                fields = self._fields(tracked)
            now = tuple(round(value, 2) if isinstance(value, float) else value for value in fields.values())
            if now != tracked.reported:
                tracked.reported = now
                self._changed(fields)
