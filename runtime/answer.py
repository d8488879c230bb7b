"""An answer that can be printed, or read piece by piece while it is being generated."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from edgevlm.errors import refuse_fork
from edgevlm.runtime.evidence import Evidence, QuestionAttention
from edgevlm.runtime.sampling import LogProb, OneOf
from edgevlm.runtime.stream import Stream

PIECE = 512  # how many rows of a prompt are appended at once
Float32 = NDArray[np.float32]
FinishReason = Literal["stop", "length", "cancelled"]
LogitsProcessor = Callable[[Sequence[int], Float32], Float32]
"""A function that maps the answer's tokens so far and the logits ``[vocabulary]`` to the logits to draw the next token from."""
Draw = Callable[[Float32], int]


@dataclass(eq=False, slots=True)
class Found:
    """What is known about an answer so far.

    ``time_s``: the stream's time when the question was asked. ``queued_ms``: the time from ``ask`` until the model started on
    the question. ``ttft_ms``: the time from ``ask`` to the first token, including the wait for the chunk in progress.
    ``tpot_ms``: the mean time per token after the first. ``prompt_tokens``: the number of tokens in the question, its earlier
    turns and its pictures, without the memory. ``probabilities``: the probability of each choice, if the question has choices.
    ``logprobs``: if requested, an entry for each drawn token, including the stop token, which ``token_ids`` omits.
    ``dropped_turns``: how many of the oldest turns did not fit in the prompt. ``looked``: the question's attention to the
    frames; None before the first token, and for a question with pictures.
    """

    time_s: float
    token_ids: list[int] = field(default_factory=list)
    queued_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    probabilities: dict[str, float] = field(default_factory=dict)
    logprobs: list[LogProb] = field(default_factory=list)
    dropped_turns: int = 0
    looked: QuestionAttention | None = None


class Answer:
    """The answer to one question. ``print(answer)`` waits for the whole answer; ``for`` and ``async for`` yield pieces as they
    come.

    The model's thread generates the answer, so a slow reader never delays the stream. An error in generation is raised when the
    text is read. An answer has every attribute of :class:`Found`; reading one of them waits for the answer's end. Reading
    ``found`` or :attr:`so_far` (the text generated so far) does not wait.
    """

    time_s: float
    token_ids: list[int]
    queued_ms: float
    ttft_ms: float
    tpot_ms: float
    finish_reason: FinishReason | None
    prompt_tokens: int
    probabilities: dict[str, float]
    logprobs: list[LogProb]
    dropped_turns: int
    looked: QuestionAttention | None

    def __init__(self, question: str, time_s: float) -> None:
        self.question, self.found = question, Found(time_s)
        self._asked_at, self._pid = time.perf_counter(), os.getpid()
        self._pieces: list[str] = []
        self._error: BaseException | None = None
        self._finished = False
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], object]] = []  # called after each change of the answer
        self._cancelled = threading.Event()
        self._future: Future[FinishReason] | None = None  # None once the answer has ended, so that the future can be freed

    def __getattr__(self, name: str) -> Any:
        if name not in Found.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.settle()
        return getattr(self.found, name)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        state = self.found.finish_reason or ("failed" if self.finished else "in progress")
        return f"Answer({self.question!r}, {self.so_far!r}, {state})"

    def __iter__(self) -> Iterator[str]:
        read, finished = 0, False
        self._check_process()
        while not finished:
            with self._changed:
                while not self._finished and len(self._pieces) == read:
                    self._changed.wait()
                new, finished = self._pieces[read:], self._finished
            yield from new
            read += len(new)
        self._raise()

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, ready, read, finished = asyncio.get_running_loop(), asyncio.Event(), 0, False
        self._check_process()

        def wake() -> None:
            with suppress(RuntimeError):  # raised once the event loop is closed
                loop.call_soon_threadsafe(ready.set)

        self._listeners.append(wake)
        try:
            while not finished:
                ready.clear()
                with self._changed:
                    new, finished = self._pieces[read:], self._finished
                for piece in new:
                    yield piece
                read += len(new)
                if not finished:
                    await ready.wait()
        finally:
            self._listeners.remove(wake)
        self._raise()

    @cached_property
    def _evidence(self) -> Evidence | None:
        return None if self.looked is None else self.looked.evidence()

    @property
    def evidence(self) -> Evidence | None:
        """The frames that the answer was read from, best first; None if the answer has no token. Waits for the answer's end."""
        self.settle()
        return self._evidence

    @property
    def text(self) -> str:
        """The text of the whole answer; reading it waits for the answer's end."""
        self.wait()
        return self.so_far

    @property
    def so_far(self) -> str:
        """The text generated so far."""
        return "".join(self._pieces)

    @property
    def finished(self) -> bool:
        """Return whether the answer has ended for any reason."""
        return self._finished

    @property
    def cancelled(self) -> bool:
        """Return whether :meth:`cancel` was called."""
        return self._cancelled.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the answer's end; return False if ``timeout`` seconds pass first. Raises the error that ended the answer."""
        finished = self.settle(timeout)
        self._raise()
        return finished

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for the answer's end without raising the error that ended it.

        Raises UserError in a forked process, where the answer would never end.
        """
        self._check_process()
        with self._changed:
            return self._changed.wait_for(lambda: self._finished, timeout)

    def _check_process(self) -> None:
        if not self._finished:
            refuse_fork(self._pid, "what answers this question")

    def cancel(self) -> None:
        """Stop generating after the current token. A question that has not started is withdrawn at once."""
        self._cancelled.set()
        if (future := self._future) is not None:
            future.cancel()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _push(self, piece: str) -> None:
        with self._changed:
            self._pieces.append(piece)
        self._wake_readers()

    def _wake_readers(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener()

    def _follow(self, future: Future[FinishReason]) -> None:
        self._future = future
        future.add_done_callback(self._finish)

    def _finish(self, future: Future[FinishReason]) -> None:
        with self._changed:
            if future.cancelled():
                self.found.finish_reason = "cancelled"
            elif error := future.exception():
                self._error = error
            else:
                self.found.finish_reason = future.result()
            self._finished, self._future = True, None
        self._wake_readers()

    def _generate(
        self,
        stream: Stream,
        embeds: Float32,
        draw: Draw,
        choices: OneOf | None,
        max_tokens: int,
        give_way: Callable[[], None],
    ) -> FinishReason:
        """Append the prompt in pieces, then draw the answer's tokens. ``give_way``: called after each piece but the last."""
        model, append = stream.model, stream.append_question
        while len(embeds) > PIECE and not self.cancelled:
            stream.score_text(embeds[:PIECE], ())
            embeds = embeds[PIECE:]
            give_way()
        detokenise, stops = DecodeStream(skip_special_tokens=True), model.bundle.chat.stop_ids
        while True:
            if self.cancelled:
                return "cancelled"
            token = draw(append(embeds))
            now = time.perf_counter()
            if not self.found.token_ids:
                self.found.ttft_ms, first = 1e3 * (now - self._asked_at), now
                self.found.looked = stream.looked
            if choices is not None:
                self.found.probabilities = choices.probabilities
            if token not in stops:
                self.found.token_ids.append(token)
                if len(self.found.token_ids) > 1:
                    self.found.tpot_ms = 1e3 * (now - first) / (len(self.found.token_ids) - 1)
                if choices is None and (piece := detokenise.step(model.tokenizer, token)):
                    self._push(piece)
            if token in stops or (choices is not None and choices.complete(self.found.token_ids)):
                if choices is not None:
                    self._push(choices.text(self.found.token_ids))
                return "stop"
            if len(self.found.token_ids) == max_tokens:
                return "length"
            embeds, append = model.engine.embed(np.asarray([token], np.int64)), stream.append_text
