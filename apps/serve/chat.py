"""``POST /v1/chat/completions``: OpenAI's requests as questions about a stream."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from edgevlm.apps.run.clock import Span, nothing_held
from edgevlm.apps.serve import media
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.serve.grammar import Grammar
from edgevlm.apps.serve.service import field as wrong
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.errors import FieldError, UserError
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.chat import Turn
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.sampling import MAX_CHOICES, OneOf
from edgevlm.runtime.time_window import NothingHeld

MAX_MESSAGES = 256


class Strict(BaseModel):
    """Unknown fields are errors, and so are values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lenient(BaseModel):
    """Unknown fields are ignored: programs written for other servers send theirs."""

    model_config = ConfigDict(extra="ignore", strict=True)


Text = Annotated[str, Field(max_length=65_536)]
Moment = Annotated[str, Field(min_length=1, max_length=40)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None
TopP = Annotated[float, Field(gt=0, le=1)] | None
Count = Annotated[int, Field(ge=1, le=1 << 31)] | None
Tokens = Annotated[Count, BeforeValidator(lambda value: None if value == -1 else value)]  # llama.cpp's -1: any number
ASKED_STREAM = "The stream: its name, or what ends in `/NAME`. A video part may name it instead; unless given, the only one."
AskedModel = Annotated[str, Field(max_length=512, description=ASKED_STREAM)]
ChoiceTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=2, max_length=MAX_CHOICES)]


class Url(Lenient):
    url: str


class Part(Lenient):
    """A text, a picture (`data:`, or `http(s):` of an allowed host), or a video: a stream, `edgevlm://NAME`, or a file of an
    allowed folder. `input_video` is llama.cpp's name for it; `input_text`, `output_text` and `input_image` are of responses."""

    type: Literal["text", "input_text", "output_text", "image_url", "input_image", "video_url", "input_video"]
    text: Text = ""
    image_url: Url | str = ""
    video_url: Url | str = ""
    input_video: Url | str = ""

    @property
    def url(self) -> str:
        given: Url | str = getattr(self, "image_url" if self.is_picture else self.type)
        return given if isinstance(given, str) else given.url

    @property
    def is_text(self) -> bool:
        return self.type.endswith("text")

    @property
    def is_picture(self) -> bool:
        return self.type in ("image_url", "input_image")

    @property
    def is_stream(self) -> bool:
        return not self.is_picture and self.url.lower().startswith("edgevlm:")


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(max_length=64)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(each.text for each in self.content if each.is_text)


class StreamOptions(Lenient):
    include_usage: bool = False


class NamedSchema(Lenient):
    json_schema: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's."""

    choice: ChoiceTexts | None = None


class ChatRequest(Lenient):
    """OpenAI's fields that mean something here."""

    model: AskedModel = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=256)] | Annotated[list[str], Field(max_length=4)] | None = None
    n: Literal[1] | None = 1
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    since: Moment | None = Field(None, description="Look at what was seen from then on: `10m`, `14:03` or RFC 3339.")
    until: Moment | None = Field(None, description="Look at what was seen up to then, written like `since`.")

    @property
    def is_plain(self) -> bool:
        """Return whether its pictures and the form of its answer take no time to prepare."""
        return not self._restriction and all(part.is_stream for _, part in self._parts())

    def sampling(self, stream: CameraStream, settings: ServerSettings) -> dict[str, Any]:
        """What :meth:`Session.ask` takes beside the question and its window. Raises FieldError."""
        given: dict[str, Any] = {
            "temperature": self.temperature or 0.0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k or 0, 0),
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed == -1 else self.seed,
        }
        if wanted := self.max_completion_tokens or self.max_tokens:
            given["max_tokens"] = min(wanted, stream.session.text_budget.answer)
        if self._restriction:
            field, kind, form = self._restriction
            with wrong(field):
                if form is None:
                    raise UserError("give the schema")
                given["logits_processor"] = kind(stream.model, form)
        if pictures := self._pictures(settings, stream.session.prepare):
            given["pictures"] = pictures
        return given

    @property
    def _restriction(self) -> tuple[str, type[OneOf] | type[Grammar], Any] | None:
        """The field that restricts the answer, by what, and to what; None where it may be any text."""
        form = self.response_format
        if self.structured_outputs is not None and self.structured_outputs.choice is not None:
            return "structured_outputs.choice", OneOf, self.structured_outputs.choice
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return "response_format", Grammar, {"type": "object"}
        return "response_format.json_schema", Grammar, form.json_schema and form.json_schema.json_schema

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else [each for each in self.stop or [] if each]

    @property
    def _asked(self) -> tuple[str, dict[str, str]]:
        """Name and window of the last video part that is a stream. Raises FieldError."""
        urls = [part.url for _, part in self._parts() if part.is_stream]
        return stream_of(urls[-1]) if urls else ("", {})

    @property
    def stream_name(self) -> str | None:
        """The stream asked about: of the last video part, else after the model's last ``/``; None for the only one."""
        return self._asked[0] or self.model.rpartition("/")[2] or None

    @property
    def window(self) -> dict[str, str]:
        """``since`` and ``until`` as they were given, in fields or in the stream's URL, which wins. Raises FieldError."""
        return {"since": self.since or "", "until": self.until or "", **self._asked[1]}

    def _pictures(self, settings: ServerSettings, prepare: Callable[[NDArray[np.uint8]], Pixels]) -> list[Pixels]:
        """Prepare the newest pictures, up to the limit. Raises FieldError for what is not allowed, no image, or too many."""
        last, remaining, shown = f"messages.{len(self.messages) - 1}.", settings.max_pictures, list[Pixels]()
        for field, part in reversed(self._parts()):
            if part.is_stream:
                continue
            with wrong(field):
                if remaining == 0 and field.startswith(last):
                    raise UserError(f"a question shows {settings.max_pictures} pictures at most (server.max_pictures)")
                if remaining == 0:
                    break
                if part.is_picture:
                    images = [media.read_picture(part.url, settings)]
                else:
                    images = media.read_video(part.url, settings, remaining)
            shown = [*(prepare(image) for image in images), *shown]
            remaining -= len(images)
        return shown

    def _parts(self) -> list[tuple[str, Part]]:
        return [
            (f"messages.{index}.content.{place}.{part.type}", part)
            for index, message in enumerate(self.messages)
            for place, part in enumerate(message.content if isinstance(message.content, list) else [])
            if not part.is_text
        ]

    def question(self) -> tuple[str, list[Turn]]:
        """The last user message, and the turns before it. A system message precedes the question. Raises FieldError."""
        question = self.messages[-1].text.strip()
        if self.messages[-1].role != "user" or not question:
            raise FieldError("messages", "the last message is the user's, and has a text")
        turns: list[Turn] = []
        asked: str | None = None
        for each in self.messages[:-1]:
            if each.role == "user":
                asked = each.text
            elif each.role == "assistant" and asked is not None:
                turns.append((asked, each.text))
                asked = None
        system = "\n".join(each.text for each in self.messages if each.role in ("system", "developer"))
        return f"{system}\n{question}".strip(), turns


def stream_of(url: str) -> tuple[str, dict[str, str]]:
    """``front-door`` and ``{"since": "10m"}`` of ``edgevlm://front-door?since=10m``. Raises FieldError."""
    match = re.fullmatch(r"(?i:edgevlm)://([^/?#]+)/?(?:\?([^#]*))?", url)
    window = dict(parse_qsl(match[2] or "", keep_blank_values=True)) if match else {}
    if match is None or window.keys() - {"since", "until"} or not all(0 < len(text) <= 40 for text in window.values()):
        raise FieldError("video_url.url", "give a stream of this server: edgevlm://NAME, or edgevlm://NAME?since=10m&until=5m")
    return match[1], window


class Completion:
    """One answer, in OpenAI's shapes. Raises FieldError for a question that is none."""

    answer: Answer | str = ""

    def __init__(self, request: ChatRequest, stream: CameraStream) -> None:
        self.request, self.stream, self.began = request, stream, time.perf_counter()
        self.question, self._turns = request.question()
        self._offset = stream.observer.offset
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.finish_reason = "stop"
        self.evidence: dict[str, Any] = {}

    def ask(self, settings: ServerSettings) -> None:
        """Ask the stream, once what the question shows is fetched. Raises UserError."""
        with wrong(self._window_field):
            window = Span.typed(**self.request.window).seconds(self._offset)
        sampling = self.request.sampling(self.stream, settings)
        self.answer = self.stream.ask(self.question, self._turns, **sampling, **window)

    @property
    def _window_field(self) -> str:
        return "since" if self.request.window["since"] else "until"

    async def complete(self) -> dict[str, Any]:
        text = "".join([piece async for piece in self.pieces()])
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}
        return {**self._common("chat.completion"), "choices": [choice], "usage": self.usage(), "edgevlm": self.extension()}

    async def events(self) -> AsyncGenerator[dict[str, str], None]:
        """The answer as it comes, as server-sent events: JSON of each chunk, then ``[DONE]``."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for piece in self.pieces():
            yield self._chunk({"content": piece})
        yield self._chunk({}, self.finish_reason, edgevlm=self.extension())
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {"data": json.dumps({**self._common("chat.completion.chunk"), "choices": [], "usage": self.usage()})}
        yield {"data": "[DONE]"}

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The answer's text as it comes, up to a stop. The answer is cancelled when nobody reads on."""
        if isinstance(self.answer, str):
            yield self.answer
            return
        stops, text, given = self.request.stops, "", 0
        held = max(map(len, stops), default=1) - 1  # characters that may be the beginning of a stop
        try:
            async for piece in self.answer:
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
        # a cancelled answer comes to its end, and thumbnails are read, while other requests go on
        self.evidence = await run_in_threadpool(self.stream.answered, self.question, self.answer)

    def cancel(self) -> None:
        if not isinstance(self.answer, str) and not self.answer.finished:
            self.answer.cancel()

    def usage(self) -> dict[str, Any]:
        """Tokens: the memory's count as prompt tokens that were cached."""
        held = prompt = said = 0
        if not isinstance(self.answer, str):
            held, said = self.stream.session.stats.tokens, len(self.answer.token_ids)
            prompt = held + self.answer.prompt_tokens
        details = {"prompt_tokens_details": {"cached_tokens": held}}
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said, **details}

    def extension(self) -> dict[str, Any]:
        common: dict[str, Any] = {"stream": self.stream.name, "policy": self.stream.session.policy}
        if isinstance(self.answer, str):
            return {**common, "time_s": None, "time": None}
        answer = self.answer
        times = {"time_s": answer.time_s, "time": self.stream.wall(answer.time_s)}
        if answer.probabilities:
            common["choices"] = {choice: round(probability, 6) for choice, probability in answer.probabilities.items()}
        waits = {name: round(getattr(answer, name), 3) for name in ("queued_ms", "ttft_ms", "tpot_ms")}
        return {**common, **times, **waits, **self.evidence}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, str]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {"data": json.dumps({**self._common("chat.completion.chunk"), "choices": [choice], **more})}

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model or self.stream.name}
