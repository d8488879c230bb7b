"""Live sources: a camera read in its own thread and reconnected whenever the connection breaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import (
    KEYFRAME_WAIT_S,
    Connection,
    Frame,
    FrameSampler,
    Grabbed,
    Source,
    SourceOptions,
    StageTimer,
    State,
)
from edgevlm.apps.sources.buffer import Slot
from edgevlm.errors import SourceError, SourceRefused, UserError


class Backoff:
    """Pauses of ``first_s * 2^n``, at most ``longest_s``, each shortened by up to half at random.

    Cameras that fail together (a switch, a power cut) are then not all tried at the same moment.
    """

    def __init__(self, first_s: float, longest_s: float, seed: int | None = None) -> None:
        self._first, self._longest = first_s, longest_s
        self._random = random.Random(seed)
        self.reset()

    def reset(self) -> None:
        """Make the next pause the first one again."""
        self._next = min(self._first, self._longest)

    def pause(self) -> float:
        """Return the seconds to wait now."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause * self._random.uniform(0.5, 1)


Deliver = Callable[["Link", Connection, Grabbed], None]


class Link:
    """Connects, then hands each picture to ``deliver`` until the connection breaks or it is abandoned.

    ``changed`` is notified when it opens and when it is over. A thread inside a library cannot be stopped: an abandoned
    link ends when the library's own timeout expires.
    """

    def __init__(self, connect: Callable[[], Connection], deliver: Deliver, changed: threading.Condition) -> None:
        self._connect, self._deliver, self._changed = connect, deliver, changed
        self.opened = self.over = self.abandoned = False
        self.finished = False  # a recording was read to its end
        self.refused = False  # the camera answered, and will answer the same again
        self.problem: str | None = None
        self.keyed = False  # a keyframe has come
        self.holding = False  # its thread waits for the frame's reader, not for the camera
        self.moved_s = self.opened_s = time.monotonic()  # when it began, opened, or brought a whole picture; when it opened
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def quiet_s(self) -> float:
        """Return the seconds since it last moved."""
        return 0.0 if self.holding else time.monotonic() - self.moved_s

    def abandon(self) -> None:
        self.abandoned = True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # whatever a driver or a library throws, the camera is tried again
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
                self.opened_s = self.moved_s = time.monotonic()
                self._changed.notify_all()
            while not self.abandoned and (grabbed := connection.grab()) is not None:
                if not grabbed.corrupt:
                    self.moved_s = time.monotonic()
                self._deliver(self, connection, grabbed)
            self.finished = connection.finished
            self.problem = connection.problem
        finally:
            connection.close()


POLL_S = 0.2  # how often a waiting reader looks for ctrl-C
ADRIFT = 4  # abandoned connections that have not ended yet: with more, no new one is opened


class LiveSource(Source):
    """Reads what ``connect`` opens. Raises SourceError, one line, when the first connection fails, unless ``options.wait``.

    Frames are captured whether :meth:`read` is called or not. Times are seconds since the first ``read``, by the monotonic
    clock, so they continue through reconnects. ``drops`` by cause: ``replaced`` (a newer frame came before it was read),
    ``corrupt`` (cannot be decoded), ``keyframe`` (came before a connection's first keyframe), ``late`` (came from an abandoned
    connection).
    """

    live = True
    _origin: float | None = None  # of the frames' times: the first read

    def __init__(self, name: str, connect: Callable[[], Connection], options: SourceOptions) -> None:
        self.name, self.rule = name, options.rule or "drop-oldest"
        self._connect, self._options = connect, options
        self._slot, self._sampler = Slot(self.rule), FrameSampler(options.fps)
        self._backoff = Backoff(*options.backoff_s, seed=options.seed)
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
        while True:
            over = self.state is State.ENDED
            if (frame := self._slot.take(POLL_S)) is not None or over:
                return frame

    def skip(self, time_s: float) -> bool:
        return False

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._link.abandon()
        self._slot.close()
        self._supervisor.join(timeout=2)
        self._link.abandon()  # it may have been opened meanwhile
        self._link.join(timeout_s=2)
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
        link.abandon()
        self.state = State.FAILED
        problem = link.problem or f"no answer within {limit:g} s (--open-timeout)"
        raise SourceError(f"camera {self.name}: {problem}" + ("" if link.refused else "; --wait waits until it is there"))

    def _supervise(self) -> None:
        """Run the state machine until the source is closed or a recording has been read to its end."""
        while not self._closing:
            link = self._link
            self._watch(link)
            if self._closing or link.finished:
                break
            self._give_up(link)
            self._redial()
        self.state = State.ENDED
        self._slot.close()

    def _redial(self) -> None:
        while not self._closing:
            self._rest()
            try:
                self._link = self._link if self._closing else self._dial()
                return
            except RuntimeError as error:  # the machine has no thread left for it now
                self.problem = str(error)

    def _give_up(self, link: Link) -> None:
        with self._changed:
            link.abandon()
            self._adrift.append(link)
            self.problem = link.problem or "the camera closed the connection"
            if self.state is not State.INITIALISING:
                self.state = State.RECONNECTING

    def _watch(self, link: Link) -> None:
        """Return when the link is over or has been quiet for too long; set the state when it stalls."""
        options = self._options
        with self._changed:
            while not self._closing and not link.over:
                quiet, limit = link.quiet_s(), options.read_timeout_s if link.opened else options.open_timeout_s
                if quiet >= limit:
                    link.problem = f"no frame for {limit:g} s" if link.opened else f"no answer within {limit:g} s"
                    return
                stalls = link.opened and options.stall_timeout_s < limit
                if stalls and quiet >= options.stall_timeout_s and self.state is State.RUNNING:
                    self.state, self.problem = State.STALLED, f"no frame for {options.stall_timeout_s:g} s"
                due = options.stall_timeout_s if stalls and quiet < options.stall_timeout_s else limit
                self._changed.wait(min(due - quiet, options.stall_timeout_s))

    def _rest(self) -> None:
        """Pause before the next attempt, and while too many abandoned connections hang."""
        end = time.monotonic() + self._backoff.pause()
        with self._changed:
            while not self._closing:
                self._adrift = [link for link in self._adrift if link.alive]
                left = end - time.monotonic()
                if left <= 0 and len(self._adrift) < ADRIFT:
                    return
                self._changed.wait(left if left > 0 else POLL_S)

    def _deliver(self, link: Link, connection: Connection, grabbed: Grabbed) -> None:
        """Sample and convert a picture, in the link's thread."""
        if not self._admits(link, connection, grabbed) or self._origin is None:
            return
        time_s = link.moved_s - self._origin
        if not self._sampler.wants(time_s):
            return
        timer = StageTimer()
        image = connection.retrieve()
        timer.mark("decode")
        if image is None:
            self.drops["corrupt"] += 1
            return
        link.holding = True
        frame = Frame(image, time_s, timer=timer)
        if self._slot.put(self.prepare(frame) if self.prepare else frame):
            self.drops["replaced"] += 1
        link.moved_s, link.holding = time.monotonic(), False

    def _admits(self, link: Link, connection: Connection, grabbed: Grabbed) -> bool:
        """Return whether a picture can be used; the first one that can makes the source RUNNING."""
        with self._changed:
            if link.abandoned:
                self.drops["late"] += 1
                return False
            if grabbed.corrupt:
                self.drops["corrupt"] += 1
                return False
            if not link.keyed:
                waited = link.moved_s - link.opened_s > KEYFRAME_WAIT_S
                link.keyed = grabbed.decoded and (grabbed.intra or waited)
                if not link.keyed:
                    self.drops["keyframe"] += 1
                    return False
                self._backoff.reset()
                self.reconnects += self.state is State.RECONNECTING
            self.state, self.problem, self.mode = State.RUNNING, None, connection.mode
            return True
