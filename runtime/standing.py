"""Ask a session's questions repeatedly, and run a callback when an answer changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.plugins import place
from edgevlm.runtime.sampling import Classified
from edgevlm.runtime.stats import SessionStats

OPEN_ABOVE, CLOSE_BELOW = 0.6, 0.4  # probabilities of yes: an answer becomes yes at the first, and no below the second


class Change(NamedTuple):
    """A changed yes-or-no answer. ``time_s``: the newest frame's time. ``probability``: the probability of yes."""

    question: str
    is_yes: bool
    probability: float
    time_s: float


class AskedSession(Protocol):
    """The part of a session that a standing question uses."""

    notify: Notify

    @property
    def stats(self) -> SessionStats: ...
    def classify(self, questions: Sequence[tuple[str, Sequence[str]]], *, watch: bool = False) -> list[Classified]: ...


class StandingQuestion(threading.Thread):
    """A thread that asks a yes-or-no question every ``every`` seconds, if the session has watched a new frame.

    The thread also runs ``callback``. The thread reports the callback's first error to the session's ``notify``, and continues.
    """

    def __init__(self, session: AskedSession, question: str, callback: Callable[[Change], object], every: float) -> None:
        if not isinstance(every, int | float) or not 0 < every <= threading.TIMEOUT_MAX:
            raise UserError(f"every={every!r}: give seconds above 0, at most {threading.TIMEOUT_MAX:g}")
        super().__init__(name="edgevlm-question", daemon=True)
        self._session, self._callback, self._every = session, callback, every
        self._question, self._ended, self._failed, self.is_yes = question, threading.Event(), False, False

    def run(self) -> None:
        seen = -1
        while not self._ended.wait(self._every):
            session, frames = self._session, self._session.stats.frames
            if frames == seen or not frames:
                continue
            try:
                ((time_s, probabilities, _),) = session.classify([(self._question, ("yes", "no"))], watch=True)
            except Exception as error:
                if not self._ended.is_set():
                    session.notify(f"question {self._question!r} stopped: {error}")
                return
            seen, probability = frames, probabilities["yes"]
            is_yes = probability >= (CLOSE_BELOW if self.is_yes else OPEN_ABOVE)
            if is_yes != self.is_yes:
                self.is_yes = is_yes
                self._call(Change(self._question, is_yes, probability, time_s))

    def _call(self, change: Change) -> None:
        try:
            self._callback(change)
        except Exception as error:
            if not self._failed:
                self._session.notify(f"callback failed: {type(error).__name__}: {error} ({place(self._callback)})")
            self._failed = True

    def cancel(self) -> None:
        """Stop asking, and wait for a callback that is running in another thread. Any thread may call this method."""
        self._ended.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()
