"""Send an answer in OpenAI's formats, whole or as it is generated."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from starlette.concurrency import run_in_threadpool

from edgevlm.apps.run.clock import Span, nothing_held
from edgevlm.apps.serve.chat import ChatRequest
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.serve.errors import ApiError
from edgevlm.apps.serve.grammar import writes_json
from edgevlm.apps.serve.service import field as wrong
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.serve.tools import CallReader, ToolUse
from edgevlm.errors import FieldError, UserError
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.chat import Dialogue
from edgevlm.runtime.sampling import LogProb
from edgevlm.runtime.time_window import NothingHeld

NAMED, COUNTED = 64, 1000  # a reply names up to NAMED ignored fields, and counts up to COUNTED
LEAST_LOGPROB = -9999.0


class Completion:
    """One answer in the format of chat completions. Raises FieldError for an invalid question."""

    answer: Answer | str = ""
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, request: ChatRequest, stream: CameraStream, ignored: Iterable[str] = ()) -> None:
        """Prepare the question. ``ignored``: the names of the original request's ignored fields."""
        self.request, self.stream, self.began = request, stream, time.perf_counter()
        self._asked, self._ignored = Dialogue(()), [*islice(ignored, COUNTED)]
        self._offset = stream.observer.offset
        self.id, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
        self.finish_reason = "stop"
        self.evidence: dict[str, Any] = {}
        self._noted = 0  # number of tokens whose log probabilities were sent

    def ask(self, settings: ServerSettings) -> None:
        """Fetch the question's pictures, then ask the stream. Raises UserError."""
        self._asked, ignored = self.request.dialogue(self.stream)
        with wrong(self._window_field):
            window = Span.typed(**self.request.window).seconds(self._offset)
        sampling, also = self.request.sampling(self.stream, settings, self._asked)
        self._ignored = [*dict.fromkeys([*self._ignored, *ignored, *also])]
        with self._until_closed():
            self.answer = self.stream.ask(self._asked, **sampling, **window)

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Convert a UserError raised inside the ``with`` block to an ApiError if the stream is closed by then."""
        try:
            yield
        except UserError:
            if not self.stream.closed:
                raise
            raise self._interrupted() from None

    def _interrupted(self) -> ApiError:
        """Return the error for an answer that was cancelled by another request or by the server's shutdown."""
        name = self.stream.name
        if self.stream.closed:
            why = f"{name} was changed, forgotten, reopened or removed before the answer was complete; ask again"
            return ApiError(409, why, "conflict", "model")
        return ApiError(503, f"the server shut down before {name} had answered; ask again in a moment", "not_ready")

    @property
    def _window_field(self) -> str:
        return "since" if self.request.window["since"] else "until"

    async def complete(self) -> dict[str, Any]:
        parts = [part async for part in self.parts()]
        text, calls = (
            "".join(each for each in parts if isinstance(each, str)),
            [each for each in parts if isinstance(each, ToolUse)],
        )
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text.strip() or None, "tool_calls": [call.described() for call in calls]}
        return self._whole({"message": message})

    async def events(self) -> AsyncGenerator[dict[str, str], None]:
        """Yield the answer as server-sent events while it is generated: each chunk's JSON, then ``[DONE]``."""
        yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        calls = 0
        async for part in self.parts():
            if isinstance(part, ToolUse):
                yield self._chunk({"delta": {"tool_calls": [{"index": calls, **part.described()}]}})
                calls += 1
            else:
                yield self._chunk({"delta": {"content": part}})
        for chunk in self._last({"delta": {}}):
            yield chunk

    async def parts(self) -> AsyncGenerator[str | ToolUse, None]:
        """Yield the answer's text and tool calls as they are generated."""
        forced = self.request.must_call and not isinstance(self.answer, str) and writes_json(self.stream.model)
        names = [each.name for each in self.request.functions] if forced or self._asked.tools else []
        reader = CallReader(names, whole=forced, only_one=self.request.parallel_tool_calls is False)
        async for piece in self.pieces():
            for part in reader.feed(piece):
                yield part
        for part in reader.end():
            yield part
        if reader.called and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yield the answer's text, up to the first stop string. Closing the generator cancels the answer."""
        if isinstance(self.answer, str):
            yield self.answer
            return
        stops, text, given = self.request.stops, "", 0
        held = max(map(len, stops), default=1) - 1  # characters held back because they may start a stop string
        try:
            async for piece in self._generated(self.answer):
                text += piece
                self.stream.pieces += 1
                ends = [place for stop in stops if (place := text.find(stop)) >= 0]
                if ends:
                    text = text[: min(ends)]
                    break
                if len(text) - held > given:
                    yield text[given : len(text) - held]
                    given = len(text) - held
            else:
                self.finish_reason = "stop" if self.answer.finish_reason == "stop" else "length"
            if text[given:]:
                yield text[given:]
        except NothingHeld as error:
            raise FieldError(self._window_field, nothing_held(error, self._offset)) from None
        finally:
            self.cancel()
        # in a thread: ending a cancelled answer and reading thumbnails must not block other requests
        self.evidence = await run_in_threadpool(self.stream.answered, self.answer.question, self.answer)

    async def _generated(self, answer: Answer) -> AsyncGenerator[str, None]:
        """Yield the answer's text piece by piece. Raises ApiError if the answer is cancelled."""
        with self._until_closed():
            async for piece in answer:
                yield piece
        if answer.finish_reason == "cancelled":
            raise self._interrupted()

    def cancel(self) -> None:
        if not isinstance(self.answer, str) and not self.answer.finished:
            self.answer.cancel()

    def usage(self) -> dict[str, Any]:
        """Return the answer's token counts. Tokens in the camera's memory count as cached prompt tokens."""
        held = prompt = said = 0
        if not isinstance(self.answer, str):
            held, said = self.stream.session.stats.tokens, len(self.answer.token_ids)
            prompt = held + self.answer.prompt_tokens
        details = {"prompt_tokens_details": {"cached_tokens": held}}
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said, **details}

    def extension(self) -> dict[str, Any]:
        named = self._ignored[:NAMED] + ([f"and {len(self._ignored) - NAMED} more"] if len(self._ignored) > NAMED else [])
        if not isinstance(self.answer, str) and self.answer.dropped_turns:
            named.append(f"messages: the {self.answer.dropped_turns} oldest turns, for which there was no room")
        common: dict[str, Any] = {"stream": self.stream.name, "policy": self.stream.session.policy, "ignored": named}
        if isinstance(self.answer, str):
            return {**common, "time_s": None, "time": None}
        answer = self.answer
        times = {"time_s": answer.time_s, "time": self.stream.wall(answer.time_s)}
        if answer.probabilities:
            common["choices"] = {choice: round(probability, 6) for choice, probability in answer.probabilities.items()}
        waits = {name: round(getattr(answer, name), 3) for name in ("queued_ms", "ttft_ms", "tpot_ms")}
        return {**common, **times, **waits, **self.evidence}

    def logprobs(self) -> dict[str, Any] | None:
        """Return the log probabilities of tokens generated since the last call, or None if they were not requested."""
        if not self.request.logprobs:
            return None
        return {"content": [
            {**self._described(each.token, each.value), "top_logprobs": [self._described(*other) for other in each.likeliest]}
            for each in self.noted()
        ], "refusal": None}  # fmt: skip

    def noted(self) -> list[LogProb]:
        if isinstance(self.answer, str):
            return []
        noted = self.answer.found.logprobs[self._noted : len(self.answer.found.token_ids)]
        self._noted += len(noted)
        return noted

    def text_of(self, token: int) -> str:
        return str(self.stream.model.tokenizer.decode([token], skip_special_tokens=False))

    def _described(self, token: int, value: float) -> dict[str, Any]:
        text = self.text_of(token)
        return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(text.encode(errors="replace"))}

    def _whole(self, said: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, **said, "finish_reason": self.finish_reason, "logprobs": self.logprobs()}
        return {**self._common(self.kind), "choices": [choice], "usage": self.usage(), "edgevlm": self.extension()}

    def _last(self, said: dict[str, Any]) -> Iterator[dict[str, str]]:
        yield self._chunk(said, self.finish_reason, edgevlm=self.extension())
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {"data": json.dumps({**self._common(self.chunk_kind), "choices": [], "usage": self.usage()})}
        yield {"data": "[DONE]"}

    def _chunk(self, said: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, str]:
        choice = {"index": 0, **said, "finish_reason": finish, "logprobs": self.logprobs()}
        return {"data": json.dumps({**self._common(self.chunk_kind), "choices": [choice], **more})}

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model or self.stream.name}


class TextCompletion(Completion):
    """One answer in the format of OpenAI's legacy completions API."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    _offset_of_text = 0

    async def complete(self) -> dict[str, Any]:
        return self._whole({"text": "".join([piece async for piece in self.pieces()])})

    async def events(self) -> AsyncGenerator[dict[str, str], None]:
        async for piece in self.pieces():
            yield self._chunk({"text": piece})
        for chunk in self._last({"text": ""}):
            yield chunk

    def logprobs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        noted, offsets = self.noted(), list[int]()
        for each in noted:
            offsets.append(self._offset_of_text)
            self._offset_of_text += len(self.text_of(each.token))
        return {
            "tokens": [self.text_of(each.token) for each in noted],
            "token_logprobs": [max(each.value, LEAST_LOGPROB) for each in noted],
            "top_logprobs": [
                {self.text_of(token): max(value, LEAST_LOGPROB) for token, value in each.likeliest} for each in noted
            ],
            "text_offset": offsets,
        }
