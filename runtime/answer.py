"""An answer while it is being generated: print it, or iterate it for its text as it comes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from edgevlm.runtime.chunk import Chunk
from edgevlm.runtime.evidence import Evidence, QuestionAttention
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.sampling import OneOf, Sampler
from edgevlm.runtime.stream import Stream
from edgevlm.runtime.time_window import TimeWindow

FinishReason = Literal["stop", "length", "cancelled"]
LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]


@dataclass(eq=False)
class Answer:
    """The answer to one question. ``print(answer)`` waits for all of it; ``for`` and ``async for`` give pieces as they come.

    The model's thread generates it, so a slow reader never holds the stream up. An error while generating is raised where the
    answer is read.

    time_s: the stream's time when it was asked. queued_ms: from ``ask`` until the model began with it. ttft_ms: from ``ask`` to
    the first token, waiting for the chunk at work included. tpot_ms: mean time of each further token. prompt_tokens: of
    question, turns and pictures, without the memory. probabilities: of each choice, where the question had choices.
    looked: where the question looked; None before the first token, and where it shows pictures.
    """

    question: str
    time_s: float
    token_ids: list[int] = field(default_factory=list)
    queued_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    probabilities: dict[str, float] = field(default_factory=dict)
    looked: QuestionAttention | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._pieces: list[str] = []
        self._error: BaseException | None = None
        self._finished = False
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], object]] = []  # called after each change
        self._cancelled = threading.Event()
        self._future: Future[FinishReason] | None = None  # none after the end: each would keep the other from being freed

    def __str__(self) -> str:
        return self.text

    def __iter__(self) -> Iterator[str]:
        read = 0
        while True:
            with self._changed:
                while not self._finished and len(self._pieces) == read:
                    self._changed.wait()
                new, finished = self._pieces[read:], self._finished
            yield from new
            read += len(new)
            if finished:
                self._raise()
                return

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, ready, read = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(ready.set)

        self._listeners.append(wake)
        try:
            while True:
                ready.clear()
                with self._changed:
                    new, finished = self._pieces[read:], self._finished
                for piece in new:
                    yield piece
                read += len(new)
                if finished:
                    self._raise()
                    return
                await ready.wait()
        finally:
            self._listeners.remove(wake)

    @cached_property
    def _evidence(self) -> Evidence | None:
        return None if self.looked is None else self.looked.evidence()

    @property
    def evidence(self) -> Evidence | None:
        """The frames that the answer was read from, best first; waits until it is finished, None where it has no token."""
        self.settle()
        return self._evidence

    @property
    def text(self) -> str:
        """The whole answer; waits until it is finished."""
        self.wait()
        return self.so_far

    @property
    def so_far(self) -> str:
        """What has been generated until now."""
        return "".join(self._pieces)

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, whatever the reason."""
        return self._finished

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when ``timeout`` seconds passed first. Raises what generation raised."""
        finished = self.settle(timeout)
        self._raise()
        return finished

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for the end, whatever it is; raises nothing."""
        with self._changed:
            return self._changed.wait_for(lambda: self._finished, timeout)

    def cancel(self) -> None:
        """Stop after the token in progress; a question that still waits is taken back at once."""
        self._cancelled.set()
        self.take_back()

    def take_back(self) -> bool:
        """Cancel a question that still waits; False once the model has begun with it."""
        future = self._future
        return future is not None and future.cancel()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _push(self, piece: str) -> None:
        """Called by the model's thread with a further piece of text."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener()

    def _follow(self, future: Future[FinishReason]) -> None:
        """Called by the session, once: this answer ends with ``future``."""
        self._future = future
        future.add_done_callback(self._finish)

    def _finish(self, future: Future[FinishReason]) -> None:
        with self._changed:
            if future.cancelled():
                self.finish_reason = "cancelled"
            elif error := future.exception():
                self._error = error
            else:
                self.finish_reason = future.result()
            self._finished, self._future = True, None
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener()


@dataclass(frozen=True, slots=True)
class Request:
    """A question to the model: when it was asked (``time.perf_counter``), in which conversation or after which turns.

    logits_processor: maps the answer's tokens so far and logits ``[vocabulary]`` to those that the next token is drawn from.
    """

    answer: Answer
    asked_at: float
    conversation: str | None
    max_tokens: int
    sampler: Sampler
    history: Sequence[tuple[str, str]] = ()
    logits_processor: LogitsProcessor | None = None
    pictures: Sequence[Pixels] = ()
    window: TimeWindow | None = None


class CallerError(Exception):
    """A caller's ``logits_processor`` failed, or its result cannot be drawn from; see the cause."""


def drawn(request: Request, logits: NDArray[np.float32]) -> int:
    """Draw the next token. Raises CallerError."""
    process = request.logits_processor
    if process is None or isinstance(process, OneOf):
        return request.sampler(logits if process is None else process(request.answer.token_ids, logits))
    try:
        return request.sampler(process(request.answer.token_ids, logits))
    except Exception as error:
        raise CallerError from error


def generate(
    request: Request, ids: Sequence[int], model: Model, stream: Stream, chunk: Chunk, prefix: int | None = None
) -> FinishReason:
    """Append the prompt ``ids`` and draw the answer's tokens; the memory is then as it was.

    The answer sees the frames of an incomplete piece of the chunk, too. prefix: where there is no video, the rows of the
    stream's prefix that the prompt continues.
    """
    answer, engine, stops = request.answer, model.engine, model.bundle.chat.stop_ids
    choices = request.logits_processor if isinstance(request.logits_processor, OneOf) else None
    pictures = [engine.encode(picture.values[None]) for picture in request.pictures]
    answer.prompt_tokens = len(ids) + len(pictures) * model.rows_per_frame
    detokenise = DecodeStream(skip_special_tokens=True)
    closing = model.closing if prefix is None else model.closing[:0]
    embeds = np.concatenate([closing, engine.embed(np.asarray(ids, np.int64))])
    with ExitStack() as stack:
        if prefix is not None:
            stack.enter_context(stream.truncated_prefix(prefix))
        stack.enter_context(stream.question(chunk.encode(), pictures, answer.time_s, request.window))
        append = stream.append_question
        while True:
            if answer.cancelled:
                return "cancelled"
            token = drawn(request, append(embeds))
            now = time.perf_counter()
            if choices is not None:
                answer.probabilities = choices.probabilities
            if not answer.token_ids:
                answer.ttft_ms, first = 1e3 * (now - request.asked_at), now
                answer.looked = None if pictures else stream.looked  # it may be read from the pictures alone
            if token not in stops:
                answer.token_ids.append(token)
                if len(answer.token_ids) > 1:
                    answer.tpot_ms = 1e3 * (now - first) / (len(answer.token_ids) - 1)
                if choices is None and (piece := detokenise.step(model.tokenizer, token)):
                    answer._push(piece)
            if token in stops or (choices is not None and choices.complete(answer.token_ids)):
                if choices is not None:
                    answer._push(choices.text(answer.token_ids))
                return "stop"
            if len(answer.token_ids) == request.max_tokens:
                return "length"
            embeds, append = engine.embed(np.asarray([token], np.int64)), stream.append_text
