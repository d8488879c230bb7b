"""Read frames in a separate thread, and connect again to cameras that fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from random import Random

import numpy as np

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import (
    Connection,
    Frame,
    FrameSampler,
    Grabbed,
    Image,
    Rule,
    Source,
    SourceOptions,
    StageTimer,
    State,
)
from edgevlm.errors import SourceError, SourceRefused, UserError, refuse_fork

KEYFRAME_WAIT_S = 30.0  # after this time without a keyframe (as with intra refresh), watch any decoded picture
POLL_S = 0.2
LATE_S = 1.0  # a recording that is this late (for example after ctrl-Z) continues without catching up
ADRIFT = 4
"""Open a new connection only while fewer abandoned connections than this still hang."""


class Slot:
    """Passes one frame at a time between threads.

    A new frame replaces an unread frame (``drop-oldest``) or waits until the unread frame is taken (``block``).
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._changed = threading.Condition()
        self._frame: Frame | None = None
        self._closed = False

    def put(self, frame: Frame) -> bool:
        """Offer a frame. Return whether the frame replaced an unread frame. A closed slot accepts no frames."""
        with self._changed:
            while self.rule == "block" and self._frame is not None and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            replaced = self._frame is not None
            self._frame = frame
            self._changed.notify_all()
            return replaced

    def take(self, timeout_s: float) -> Frame | None:
        """Take the slot's frame, waiting up to ``timeout_s`` seconds. Return None if no frame came or the slot is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._closed, timeout_s)
            frame, self._frame = self._frame, None
            self._changed.notify_all()
            return frame

    def close(self) -> None:
        """Accept no more frames, and wake every waiting thread. A frame already in the slot can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ThreadedSource(Source):
    """A source whose thread passes frames to the reader through a :class:`Slot`."""

    def __init__(self, name: str, rule: Rule) -> None:
        self.name, self.rule, self._slot, self._pid = name, rule, Slot(rule), os.getpid()

    def _put(self, frame: Frame) -> None:
        if self.prepare is not None:
            frame = replace(frame, pixels=self.prepare(frame.image))
            if frame.timer is not None:
                frame.timer.mark("preprocess")
        if self._slot.put(frame):
            self.drops["replaced"] += 1

    def read(self) -> Frame | None:
        refuse_fork(self._pid, self.name)
        while True:
            over = self.state in (State.ENDED, State.FAILED)
            if (frame := self._slot.take(POLL_S)) is not None or over:
                return frame


class ReadAhead(ThreadedSource):
    """Reads another source in a separate thread, starting with the first :meth:`read`.

    The next frame is decoded and prepared while the current frame is watched. ``paced``: play the source at no more than
    ``speed`` times its own pace.
    """

    def __init__(self, source: Source, *, paced: bool = False, speed: float = 1.0, rule: Rule = "block") -> None:
        super().__init__(source.name, rule)
        self._source, self._speed, self.live, self.mode, self.drops = source, speed, paced, source.mode, source.drops
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._starting = threading.Lock()  # held while the thread is started or joined

    def _run(self) -> None:
        origin: float | None = None
        try:
            with closing(self._source):
                for frame in self._source:
                    if self.live:
                        origin = time.monotonic() - frame.time_s / self._speed if origin is None else origin
                        early = origin + frame.time_s / self._speed - time.monotonic()
                        self._closing.wait(max(0.0, early))
                        origin -= early if early < -LATE_S else 0.0
                        if frame.timer is not None:
                            frame.timer.resume()
                    if self._closing.is_set():
                        break
                    self.state = State.RUNNING
                    self._put(frame)
        except BaseException as error:
            self._error = error
        finally:
            self.state = State.FAILED if self._error else State.ENDED
            self._slot.close()

    def read(self) -> Frame | None:
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        if (frame := super().read()) is None and self._error is not None:
            raise self._error
        return frame

    def skip(self, time_s: float) -> bool:
        return self._source.skip(time_s)

    def close(self) -> None:
        self._closing.set()
        self._slot.close()
        self._source.interrupt()
        with self._starting:
            if self._thread.ident is None:
                self._source.close()
            else:
                self._thread.join(timeout=2)
        super().close()


def pauses(first_s: float, longest_s: float, random: Random) -> Iterator[float]:
    """Yield the pauses between attempts to connect, in seconds. Each pause is twice as long as the one before, up to
    ``longest_s``.

    Each pause is then shortened by a random fraction, at most half. This keeps cameras that fail together (as in a power cut)
    from reconnecting at the same moment.
    """
    while True:
        yield min(first_s, longest_s) * random.uniform(0.5, 1)
        first_s = min(2 * first_s, longest_s)


Deliver = Callable[["Link", Connection, Grabbed], None]


class Link:
    """Connects to a camera in a separate thread, and passes on its pictures until the connection breaks or is abandoned.

    ``deliver``: called with each picture. ``changed``: notified when the connection opens and when it ends. A thread cannot be
    stopped inside a library, so an abandoned link ends only when the library's own timeout expires.
    """

    def __init__(self, connect: Callable[[], Connection], deliver: Deliver, changed: threading.Condition) -> None:
        self._connect, self._deliver, self._changed = connect, deliver, changed
        self.opened = self.over = self.abandoned = False
        self.finished = False
        self.refused = False  # the camera refused the connection, and would refuse a retry
        self.problem: str | None = None
        self.keyed = False  # a keyframe has arrived, and no damaged picture since then
        self.newest: Image | None = None
        self.frozen = False
        self.holding = False  # whether the thread waits for the reader, not for the camera
        self.moved_s = time.monotonic()
        self.unkeyed_s = self.moved_s  # when the link began to wait for a keyframe
        self.thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self.thread.start()

    def quiet_s(self) -> float:
        """Return the seconds since data last arrived, or 0 if the thread is waiting for the reader."""
        return 0.0 if self.holding else time.monotonic() - self.moved_s

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # retry the camera whatever a driver or library raises
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.problem = getattr(error, "strerror", None) or kind + mask_credentials(str(error))
            self.refused = isinstance(error, SourceRefused)
        finally:
            with self._changed:
                self.over = True
                self._changed.notify_all()

    def _read(self) -> None:
        connection = self._connect()
        try:
            with self._changed:
                self.opened = True
                self.unkeyed_s = self.moved_s = time.monotonic()
                self._changed.notify_all()
            while not self.abandoned and (grabbed := connection.grab()) is not None:
                if not grabbed.corrupt and not self.frozen:
                    self.moved_s = time.monotonic()
                self._deliver(self, connection, grabbed)
            self.finished, self.problem = connection.finished, connection.problem
        finally:
            connection.close()


class LiveSource(ThreadedSource):
    """A live source, such as a camera. Raises SourceError if the first attempt to connect fails and ``options.wait`` is false.

    Frames are captured even when :meth:`read` is not called. A frame's time is the number of monotonic seconds since the first
    ``read``, including time spent reconnecting.

    ``drops`` counts lost frames by cause. ``replaced``: a newer frame came before the frame was read. ``corrupt``: the frame
    cannot be decoded. ``keyframe``: the frame came before the first keyframe, or between a corrupt picture and the next
    keyframe. ``repeated``: the frame is identical to a USB camera's previous frame. ``late``: the frame came from an abandoned
    connection.
    """

    live = True
    _origin: float | None = None  # the monotonic time of the first read, which is the stream's 0 s

    def __init__(self, name: str, connect: Callable[[], Connection], options: SourceOptions) -> None:
        super().__init__(name, options.rule or "drop-oldest")
        self._connect, self._options, self._sampler = connect, options, FrameSampler(options.fps)
        self._random = Random(options.seed)
        self._pauses = pauses(*options.backoff_s, self._random)
        self._changed = threading.Condition()
        self._closing = False
        self._adrift: list[Link] = []
        self._link = self._dial()
        self._await_first()
        self._supervisor = threading.Thread(target=self._supervise, name="edgevlm-source", daemon=True)
        self._supervisor.start()

    def read(self) -> Frame | None:
        if self._origin is None:
            self._origin = time.monotonic()
        return super().read()

    def skip(self, time_s: float) -> bool:
        return False

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._link.abandoned = True
        self._slot.close()
        self._supervisor.join(timeout=2)
        self._link.abandoned = True  # the supervisor may have opened a new link before it stopped
        self._link.thread.join(timeout=2)
        super().close()

    def _dial(self) -> Link:
        self.attempts += 1
        return Link(self._connect, self._deliver, self._changed)

    def _await_first(self) -> None:
        link, limit = self._link, self._options.open_timeout_s
        with self._changed:
            self._changed.wait_for(lambda: link.opened or link.over, limit)
        if link.opened or (self._options.wait and not link.refused):
            return
        link.abandoned = True
        self.state = State.FAILED
        problem = link.problem or f"no answer within {limit:g} s (--open-timeout)"
        raise SourceError(f"camera {self.name}: {problem}" + ("" if link.refused else "; add --wait to keep trying"))

    def _supervise(self) -> None:
        while not self._closing:
            link = self._link
            self._watch(link)
            if self._closing or link.finished:
                break
            with self._changed:
                link.abandoned = True
                self._adrift.append(link)
                self.problem = link.problem or "the camera closed the connection"
                if self.state is not State.INITIALISING:
                    self.state = State.RECONNECTING
            while self._link is link and not self._closing:
                self._rest()
                try:
                    self._link = link if self._closing else self._dial()
                except RuntimeError as error:  # the system cannot start another thread at the moment
                    self.problem = str(error)
        self.state = State.ENDED
        self._slot.close()

    def _watch(self, link: Link) -> None:
        options = self._options
        with self._changed:
            while not self._closing and not link.over:
                quiet, limit = link.quiet_s(), options.read_timeout_s if link.opened else options.open_timeout_s
                if quiet >= limit:
                    link.problem = f"no frame for {limit:g} s" if link.opened else f"no answer within {limit:g} s"
                    return
                stalls = link.opened and options.stall_timeout_s < limit
                if stalls and quiet >= options.stall_timeout_s and self.state is State.RUNNING:
                    seen = "the same picture" if link.frozen else "no frame"
                    self.state, self.problem = State.STALLED, f"{seen} for {options.stall_timeout_s:g} s"
                due = options.stall_timeout_s if stalls and quiet < options.stall_timeout_s else limit
                self._changed.wait(min(due - quiet, options.stall_timeout_s))

    def _rest(self) -> None:
        end = time.monotonic() + next(self._pauses)
        with self._changed:
            while not self._closing:
                self._adrift = [link for link in self._adrift if link.thread.is_alive()]
                left = end - time.monotonic()
                if left <= 0 and len(self._adrift) < ADRIFT:
                    return
                self._changed.wait(left if left > 0 else POLL_S)

    def _deliver(self, link: Link, connection: Connection, grabbed: Grabbed) -> None:
        if not self._admits(link, connection, grabbed) or self._origin is None:
            return
        time_s = time.monotonic() - self._origin
        if not self._sampler.wants(time_s):
            return
        timer = StageTimer()
        image = connection.retrieve()
        timer.mark("decode")
        if image is None:
            self.drops["corrupt"] += 1
            return
        if connection.repeats:
            link.frozen, link.newest = link.newest is not None and np.array_equal(image, link.newest), image
            if link.frozen:
                self.drops["repeated"] += 1
                return
        link.holding = True
        self._put(Frame(image, time_s, timer=timer))
        link.moved_s, link.holding = time.monotonic(), False

    def _admits(self, link: Link, connection: Connection, grabbed: Grabbed) -> bool:
        with self._changed:
            if link.abandoned:
                self.drops["late"] += 1
                return False
            if grabbed.corrupt:
                self.drops["corrupt"] += 1
                link.keyed, link.unkeyed_s = False, time.monotonic()  # pictures stay smeared until the next keyframe
                return False
            if not link.keyed:
                waited = link.moved_s - link.unkeyed_s > KEYFRAME_WAIT_S
                link.keyed = grabbed.decoded and (grabbed.intra or waited)
                if not link.keyed:
                    self.drops["keyframe"] += 1
                    return False
                self._pauses = pauses(*self._options.backoff_s, self._random)
                self.reconnects += self.state is State.RECONNECTING
            if link.frozen:
                return True
            self.state, self.problem, self.mode = State.RUNNING, None, connection.mode
            return grabbed.decoded
