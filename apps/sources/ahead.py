"""A recorded source read in a thread of its own: one frame ahead, or at its own speed like a camera."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edgevlm.apps.sources.base import Frame, Rule, Source, State
from edgevlm.apps.sources.slot import Slot

POLL_S = 0.2  # how often a waiting reader looks for ctrl-C


class Ahead(Source):
    """Reads another source in its own thread into a :class:`Slot`, from the first :meth:`read` on.

    Under ``block`` each frame is decoded and prepared while the one before it is being watched, and none is lost. Under
    ``drop-oldest`` a frame that was not taken in time is counted in ``drops`` as ``replaced``. ``paced`` holds the source to
    its own timestamps.
    """

    def __init__(self, source: Source, *, paced: bool = False, rule: Rule = "block") -> None:
        self.name, self.rule, self._source, self._paced = source.name, rule, source, paced
        self.live, self.mode = paced, source.mode
        self.drops = source.drops
        self._slot = Slot(rule)
        self._error: BaseException | None = None
        self._closing, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._reading = False  # nothing is dropped, and no time passes, before somebody reads

    def _run(self) -> None:
        try:
            origin: float | None = None
            for frame in self._source:
                if self._paced:
                    origin = time.monotonic() - frame.time_s if origin is None else origin
                    self._closing.wait(max(0.0, origin + frame.time_s - time.monotonic()))
                    if frame.laps is not None:
                        frame.laps.resume()
                if self._closing.is_set():
                    break
                self.state = State.RUNNING
                if self._slot.put(self.finish(frame) if self.finish else frame):
                    self.drops["replaced"] += 1
        except BaseException as error:
            self._error = error
        finally:
            self._source.close()
            self.state = State.FAILED if self._error else State.ENDED
            self._slot.close()
            self._over.set()

    def read(self) -> Frame | None:
        if not self._reading:
            self._reading = True
            self._thread.start()
        while True:
            over = self._over.is_set()
            if (frame := self._slot.take(POLL_S)) is not None:
                return frame
            if over:
                break
        if self._error is not None:
            raise self._error
        return None

    def skip(self, time_s: float, seen: Callable[[Frame], object] | None = None) -> bool:
        return self._source.skip(time_s, seen)

    def close(self) -> None:
        self._closing.set()
        self._slot.close()
        self._source.interrupt()
        if self._reading:
            self._thread.join(timeout=2)
        else:
            self._source.close()
        super().close()
