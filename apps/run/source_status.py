"""What to say, once each, when a source stops giving frames and when it goes on."""

from __future__ import annotations

import time

from edgevlm.apps.sources import Source, State


class SourceStatus:
    """Compares a source with how it was when last looked at."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._said: tuple[State, str] | None = None
        self._since = 0.0

    def news(self) -> str | None:
        """One line for a person, without credentials; None when nothing has changed that matters."""
        state, problem = self._source.state, self._source.problem
        if problem is None or state in (State.ENDED, State.FAILED):
            return self._over(state)
        if (state, problem) == self._said:
            return None
        self._since = self._since if self._said else time.monotonic()
        self._said = (state, problem)
        return f"{self._source.name}: {'waiting for it' if state is State.INITIALISING else state.value} ({problem})"

    def _over(self, state: State) -> str | None:
        if self._said is None or state is not State.RUNNING:
            return None
        self._said = None
        return f"{self._source.name}: running again after {time.monotonic() - self._since:.0f} s"
