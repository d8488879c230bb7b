"""Frames between the thread that captures and the one that watches."""

from __future__ import annotations

import threading
import time

from edgevlm.apps.sources.base import Frame, Rule, Source, State


class Slot:
    """Holds one frame between two threads. A new frame replaces one that is there (``drop-oldest``) or waits (``block``)."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._changed = threading.Condition()
        self._frame: Frame | None = None
        self._closed = False

    def put(self, frame: Frame) -> bool:
        """Offer a frame; return whether it replaced one that had not been taken. A closed slot takes none."""
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
        """Return the frame that is there or comes within ``timeout_s``, else None; at once when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._closed, timeout_s)
            frame, self._frame = self._frame, None
            self._changed.notify_all()
            return frame

    def close(self) -> None:
        """Take no more frames and end every wait; the one that is there may still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


LATE_S = 1.0  # a recording later than this, after ctrl-Z for one, goes on from there and does not catch up
POLL_S = 0.2  # how often a waiting reader looks for ctrl-C


class ReadAhead(Source):
    """Reads another source in its own thread into a :class:`Slot`, from the first :meth:`read` on.

    Each frame is decoded and prepared while the one before it is being watched. ``drops`` counts as ``replaced`` those not
    taken in time under ``drop-oldest``. ``paced`` holds the source to ``speed`` times the pace of its timestamps.
    """

    def __init__(self, source: Source, *, paced: bool = False, speed: float = 1.0, rule: Rule = "block") -> None:
        self.name, self.rule, self._source, self._paced = source.name, rule, source, paced
        self._speed = speed
        self.live, self.mode = paced, source.mode
        self.drops = source.drops
        self._slot = Slot(rule)
        self._error: BaseException | None = None
        self._closing, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._reading = False  # nothing is dropped, and no time passes, before the first read
        self._starting = threading.Lock()

    def _run(self) -> None:
        try:
            origin: float | None = None
            for frame in self._source:
                if self._paced:
                    origin = time.monotonic() - frame.time_s / self._speed if origin is None else origin
                    early = origin + frame.time_s / self._speed - time.monotonic()
                    self._closing.wait(max(0.0, early))
                    origin -= early if early < -LATE_S else 0.0
                    if frame.timer is not None:
                        frame.timer.resume()
                if self._closing.is_set():
                    break
                self.state = State.RUNNING
                if self._slot.put(self.prepare(frame) if self.prepare else frame):
                    self.drops["replaced"] += 1
        except BaseException as error:
            self._error = error
        finally:
            self._source.close()
            self.state = State.FAILED if self._error else State.ENDED
            self._slot.close()
            self._over.set()

    def read(self) -> Frame | None:
        with self._starting:
            if not self._reading:
                self._thread.start()
                self._reading = True
        while True:
            over = self._over.is_set()
            if (frame := self._slot.take(POLL_S)) is not None:
                return frame
            if over:
                break
        if self._error is not None:
            raise self._error
        return None

    def skip(self, time_s: float) -> bool:
        return self._source.skip(time_s)

    def close(self) -> None:
        self._closing.set()
        self._slot.close()
        self._source.interrupt()
        with self._starting:
            if not self._reading:
                self._source.close()
        if self._reading:
            self._thread.join(timeout=2)
        super().close()
