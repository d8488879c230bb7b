"""Room for one frame between the thread that captures and the one that watches."""

from __future__ import annotations

import threading

from edgevlm.apps.sources.base import Frame, Rule


class Slot:
    """Holds the frame that came and was not taken yet, so that neither side works on more than one.

    Rule ``drop-oldest``: a frame that comes while the slot is full replaces the one in it. Rule ``block``: it waits. A still
    frame, which says nothing but the time, neither replaces one that is to be watched nor is missed.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._changed = threading.Condition()
        self._frame: Frame | None = None
        self._closed = False

    def put(self, frame: Frame) -> bool:
        """Offer a frame; True when it replaced one that nobody had taken. A closed slot takes none."""
        with self._changed:
            while self.rule == "block" and self._frame is not None and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            replaced = self._frame is not None and not self._frame.still
            if replaced and frame.still:
                return False
            self._frame = frame
            self._changed.notify_all()
            return replaced

    def take(self, timeout_s: float) -> Frame | None:
        """The frame that is there or comes within ``timeout_s``; None where none does, or at once when closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._closed, timeout_s)
            frame, self._frame = self._frame, None
            self._changed.notify_all()
            return frame

    def close(self) -> None:
        """Take no more frames and let nobody wait; the one that is there may still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
