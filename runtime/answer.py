"""An answer while it is being generated: iterate it for text, from any thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True, eq=False)
class Answer:
    """Iterate for pieces of text as they come; :attr:`text` waits for the end.

    Generation runs in its own thread, so a slow reader never holds the stream. An error while generating is raised where the
    answer is read.
    """

    question: str
    time_s: float
    token_ids: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0  # from ask() to the first token, waiting for the running chunk included
    tpot_ms: float = 0.0  # mean time of each further token
    finish_reason: FinishReason | None = None
    _pieces: queue.SimpleQueue[str | BaseException | None] = field(default_factory=queue.SimpleQueue, repr=False)
    _text: str = ""
    _error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    def __iter__(self) -> Iterator[str]:
        while (piece := self._pieces.get()) is not None:
            if isinstance(piece, BaseException):
                self._pieces.put(None)
                raise piece
            yield piece
        self._pieces.put(None)

    @property
    def text(self) -> str:
        """The whole answer; waits until it is finished."""
        self.wait()
        return self._text

    @property
    def so_far(self) -> str:
        """What has been generated until now."""
        return self._text

    def settle(self) -> None:
        """Wait for the end, whatever it is; raises nothing."""
        self._done.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when ``timeout`` seconds passed first. Raises what generation raised."""
        finished = self._done.wait(timeout)
        if self._error is not None:
            raise self._error
        return finished

    def cancel(self) -> None:
        """Stop after the token in progress."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def push(self, piece: str) -> None:
        """Called by the session: a further piece of text."""
        self._text += piece
        self._pieces.put(piece)

    def finish(self, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """Called by the session, once."""
        self.finish_reason, self._error = reason, error
        self._pieces.put(error)
        self._done.set()
