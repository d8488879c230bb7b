"""A reader thread that keeps the newest frame, so that a slow consumer never delays capture nor sees old frames."""

from __future__ import annotations

import threading
import time

from edgevlm.apps.sources.base import Frame, Rule, Source, State


class NewestFrame(Source):
    """Reads another source in its own thread into a slot for one frame, from the first :meth:`read` on.

    A frame that arrives while the slot is full replaces the one in it (rule ``drop-oldest``), and is
    counted in ``drops`` as ``replaced``.
    ``paced`` holds a recorded source to its own timestamps, so that a file or the demo behaves like a camera.
    """

    live = True
    rule: Rule = "drop-oldest"

    def __init__(self, source: Source, *, paced: bool = False) -> None:
        self.name, self._source, self._paced = source.name, source, paced
        self._changed = threading.Condition()
        self._slot: Frame | None = None
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._reading = False  # nothing is dropped, and no time passes, before somebody reads

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            origin: float | None = None
            for frame in self._source:
                if self._paced:
                    origin = time.monotonic() - frame.time_s if origin is None else origin
                    self._closing.wait(max(0.0, origin + frame.time_s - time.monotonic()))
                if self._closing.is_set():
                    break
                with self._changed:
                    self.state = State.RUNNING
                    if self._slot is not None:
                        self.drops["replaced"] += 1
                    self._slot = frame
                    self._changed.notify()
        except BaseException as caught:
            error = caught
        finally:
            self._source.close()
            with self._changed:
                self._error = error
                self.state = State.FAILED if error else State.ENDED
                self._changed.notify()

    def read(self) -> Frame | None:
        if not self._reading:
            self._reading = True
            self._thread.start()
        with self._changed:
            while self._slot is None:
                if self.state in (State.ENDED, State.FAILED):
                    if self._error is not None:
                        raise self._error
                    return None
                self._changed.wait(0.2)  # wakes up often enough for ctrl-C
            frame, self._slot = self._slot, None
            return frame

    def close(self) -> None:
        self._closing.set()
        if self._reading:
            self._thread.join(timeout=2)
        else:
            self._source.close()
        super().close()
