"""Live sources: a camera read in its own thread and reconnected whenever the connection breaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import (
    KEYFRAME_WAIT_S,
    LEAST_S,
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

    Cameras that died together (a switch, a power cut) are so not all tried in the same moment.
    """

    def __init__(self, first_s: float, longest_s: float, seed: int | None = None) -> None:
        self._first, self._longest = first_s, longest_s
        self._random = random.Random(seed)
        self.reset()

    def reset(self) -> None:
        """It worked: the next pause is a short one again."""
        self._next = min(self._first, self._longest)

    def pause(self) -> float:
        """Seconds to wait now."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause * self._random.uniform(0.5, 1)


Deliver = Callable[["Link", Connection, Grabbed], None]


class Link:
    """Connects, then hands each picture to ``deliver`` until the connection breaks or it is abandoned.

    ``changed`` is notified when it opens and when it is over. A thread inside a library cannot be stopped: an abandoned
    link ends by itself when the library lets go of it, which its own timeouts see to.
    """

    def __init__(self, connect: Callable[[], Connection], deliver: Deliver, changed: threading.Condition) -> None:
        self._connect, self._deliver, self._changed = connect, deliver, changed
        self.opened = self.over = self.abandoned = False
        self.finished = False  # it was a recording, and that has been read to its end
        self.refused = False  # the camera answered, and trying again as before is of no use
        self.problem: str | None = None
        self.keyed = False  # a picture that stands alone has come
        self.holding = False  # its thread waits for the frame's reader, and not for the camera
        self.moved_s = self.opened_s = time.monotonic()  # when it began, opened, or brought a whole picture; when it opened
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def quiet_s(self) -> float:
        """Seconds since it last moved."""
        return 0.0 if self.holding else time.monotonic() - self.moved_s

    def abandon(self) -> None:
        self.abandoned = True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # whatever a driver or a library throws, the camera is tried again
            self.problem = _words(error)
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


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (
        mask_credentials(str(error))
        if isinstance(error, UserError)
        else f"{type(error).__name__}: {mask_credentials(str(error))}"
    )


TOLERANCE_S = 2.0  # how far a camera's clock may drift or a picture be late before the clock is no longer believed


class StampMender:
    """Makes the stamps of one camera strictly increasing and keeps them near the times the pictures arrived at.

    The first mended time is the first arrival. After it, with stamps ``s``, arrivals ``a`` and mended times ``m``, a step of
    the camera's clock is believed where it goes forwards and leads to a time near the arrival::

        m[n] = m[n-1] + (s[n] - s[n-1])           if s[n] > s[n-1] and |m[n-1] + s[n] - s[n-1] - a[n]| <= TOLERANCE_S
             = max(a[n], m[n-1] + LEAST_S)        otherwise: the stamp is missing, repeated, or has jumped; ``mended`` counts it

    So a regular clock passes unchanged but for where it begins; a clock that jumps (set by NTP, wrapped, restarted with the
    camera) goes on from the arrival, by its own steps again.
    """

    def __init__(self) -> None:
        self.mended = 0  # stamps that were not believed
        self._stamp: float | None = None
        self._time: float | None = None

    def __call__(self, stamp_s: float | None, arrival_s: float) -> float:
        """The mended time of a picture, seconds on the clock of ``arrival_s``, which must not run backwards."""
        before, self._stamp = self._stamp, stamp_s
        if self._time is None:
            self._time = arrival_s
            return self._time
        step = stamp_s - before if stamp_s is not None and before is not None else 0.0
        if step > 0 and abs(self._time + step - arrival_s) <= TOLERANCE_S:
            self._time = max(self._time + step, self._time + LEAST_S)
        else:
            self.mended += stamp_s is not None
            self._time = max(arrival_s, self._time + LEAST_S)
        return self._time

    def restart(self) -> None:
        """Another connection has another origin: its first stamp says nothing about the time since the last one."""
        self._stamp = None


POLL_S = 0.2  # how often a waiting reader looks for ctrl-C
ADRIFT = 4  # abandoned connections that have not ended yet: with more, no new one is opened


class LiveSource(Source):
    """Reads what ``connect`` opens. Raises SourceError, one line, when the first connection fails and is not waited for.

    Capture goes on whether :meth:`read` is called or not, and ``read`` never waits for more than the next frame. Times are
    seconds since the first ``read``, by the monotonic clock, so that they go on through every reconnect; what came before
    that call is let go of. ``drops`` by cause: ``replaced`` (a newer frame came before it was read), ``corrupt`` (cannot be
    decoded), ``keyframe`` (came before the first picture of a connection that stands alone), ``late`` (of a connection
    that had been abandoned).
    """

    live = True
    _origin: float | None = None  # of the frames' times: when somebody first read

    def __init__(self, name: str, connect: Callable[[], Connection], options: SourceOptions) -> None:
        self.name, self.rule = name, options.rule or "drop-oldest"
        self._connect, self._options = connect, options
        self._slot, self._sampler, self._stamps = Slot(self.rule), FrameSampler(options.fps), StampMender()
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

    def skip(self, time_s: float, seen: Callable[[Frame], object] | None = None) -> bool:
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
        """The state machine, until the source is closed or a recording has been read to its end."""
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
        """Return when the link is over or has been quiet for too long; meanwhile say so when it stalls."""
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
        """Pause before the next attempt, and for as long as too many of the abandoned connections hang."""
        end = time.monotonic() + self._backoff.pause()
        with self._changed:
            while not self._closing:
                self._adrift = [link for link in self._adrift if link.alive]
                left = end - time.monotonic()
                if left <= 0 and len(self._adrift) < ADRIFT:
                    return
                self._changed.wait(left if left > 0 else POLL_S)

    def _deliver(self, link: Link, connection: Connection, grabbed: Grabbed) -> None:
        """In the link's thread: what becomes of a picture."""
        if not self._admits(link, connection, grabbed) or self._origin is None:
            return
        time_s = link.moved_s - self._origin
        source_s = self._stamps(grabbed.stamp_s, time_s) if grabbed.stamp_s is not None else None
        if not self._sampler.wants(time_s):
            return
        timer = StageTimer()
        image = connection.retrieve()
        timer.mark("decode")
        if image is None:
            self.drops["corrupt"] += 1
            return
        link.holding = True
        frame = Frame(image, time_s, source_s=source_s, timer=timer)
        if self._slot.put(self.prepare(frame) if self.prepare else frame):
            self.drops["replaced"] += 1
        link.moved_s, link.holding = time.monotonic(), False

    def _admits(self, link: Link, connection: Connection, grabbed: Grabbed) -> bool:
        """Whether a picture can be used; the first one that can makes the source RUNNING."""
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
                self._stamps.restart()
                self._backoff.reset()
                self.reconnects += self.state is State.RECONNECTING
            self.state, self.problem, self.mode = State.RUNNING, None, connection.mode
            return True
