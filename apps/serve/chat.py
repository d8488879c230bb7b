"""``POST /v1/chat/completions``: OpenAI's requests as questions about a stream."""

from __future__ import annotations

import asyncio
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

from edgevlm.apps.run.clock import Asked
from edgevlm.apps.serve import grammar, media
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.errors import FieldError, UserError
from edgevlm.runtime.answer import Answer, LogitsProcessor
from edgevlm.runtime.chat import Turn
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.sampling import MAX_CHOICES, OneOf
from edgevlm.runtime.time_window import NothingHeld

MAX_TEXT = 65_536  # characters of one message
MAX_MESSAGES = 256


class Strict(BaseModel):
    """Unknown fields are errors, and so are values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lenient(BaseModel):
    """Unknown fields are ignored: programs written for other servers send theirs."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(Lenient):
    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_TEXT)]


class ImageUrl(Lenient):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Lenient):
    """A picture that this question shows: ``data:``, or ``http(s):`` of an allowed host."""

    type: Literal["image_url"]
    image_url: ImageUrl


class MediaUrl(Lenient):
    url: Annotated[str, Field(max_length=4096)]


class VideoPart(Lenient):
    """A stream, ``edgevlm://NAME``, or a file of an allowed folder. ``input_video`` is llama.cpp's name for it."""

    type: Literal["video_url", "input_video"]
    video_url: MediaUrl | None = None
    input_video: MediaUrl | None = None

    @property
    def url(self) -> str:
        media = self.video_url or self.input_video
        return "" if media is None else media.url

    @property
    def is_stream(self) -> bool:
        return self.url.lower().startswith("edgevlm:")


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class ChatMessage(Lenient):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[list[Part], Field(max_length=64)]
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(each.text for each in self.content if isinstance(each, TextPart))


class StreamOptions(Lenient):
    include_usage: bool = False


Schema = dict[str, Any] | bool
ChoiceTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=2, max_length=MAX_CHOICES)]
Pattern = Annotated[str, Field(min_length=1, max_length=grammar.MAX_GRAMMAR)]


Count = Annotated[int, Field(ge=1, le=1 << 31)] | None
Tokens = Annotated[Count, BeforeValidator(lambda value: None if value == -1 else value)]  # llama.cpp's -1: any number
Moment = Annotated[str, Field(min_length=1, max_length=40)]
ASKED_STREAM = "The stream: its name, or what ends in `/NAME`. A video part may name it instead; unless given, the only one."


class VideoSampling(Lenient):
    """Of a file: as many frames, at most so many a second."""

    num_frames: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    fps: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None


class MediaSampling(Lenient):
    video: VideoSampling = VideoSampling()


class NamedSchema(Lenient):
    json_schema: Schema = Field(default=True, alias="schema")


class ResponseFormat(Lenient):
    """OpenAI's; ``schema`` beside ``json_object`` is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    object_schema: Schema | None = Field(default=None, alias="schema")


class StructuredOutputs(Strict):
    """vLLM's."""

    choice: ChoiceTexts | None = None
    json_schema: Schema | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: Pattern | None = None


class ChatRequest(Lenient):
    """OpenAI's fields that mean something here."""

    model: Annotated[str, Field(max_length=512, description=ASKED_STREAM)] = ""
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=256)] | Annotated[list[str], Field(max_length=4)] | None = None
    n: Literal[1] | None = 1
    media_io_kwargs: MediaSampling = MediaSampling()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    since: Moment | None = Field(None, description="Look at what was seen from then on: `10m`, `14:03` or RFC 3339.")
    until: Moment | None = Field(None, description="Look at what was seen up to then, written like `since`.")

    @property
    def sampling(self) -> dict[str, Any]:
        """What :meth:`Session.ask` takes to draw the answer."""
        return {
            "temperature": self.temperature or 0.0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k or 0, 0),
            "min_p": self.min_p or 0.0,
            "seed": None if self.seed == -1 else self.seed,
        }

    def constraint(self) -> tuple[str, Literal["choice", "json", "regex"], Any] | None:
        """The field that says what the answer must be, what kind it is of, and its value. Raises FieldError for two of them."""
        wanted, form = self.structured_outputs or StructuredOutputs(), self.response_format or ResponseFormat(type="text")
        found: list[tuple[str, Literal["choice", "json", "regex"], Any]] = []
        if form.type == "json_schema":
            if form.json_schema is None:
                raise FieldError("response_format.json_schema", "give the schema")
            found.append(("response_format.json_schema", "json", form.json_schema.json_schema))
        if form.type == "json_object":
            found.append(("response_format", "json", form.object_schema or grammar.ANY_OBJECT))
        if wanted.choice is not None:
            found.append(("structured_outputs.choice", "choice", wanted.choice))
        if wanted.json_schema is not None or wanted.json_object:
            schema = grammar.ANY_OBJECT if wanted.json_schema is None else wanted.json_schema
            found.append(("structured_outputs.json", "json", schema))
        if wanted.regex is not None:
            found.append(("structured_outputs.regex", "regex", wanted.regex))
        if len(found) > 1:
            raise FieldError(found[1][0], f"the answer cannot follow {found[0][0]} too")
        return found[0] if found else None

    def logits_processor(self, model: Model) -> LogitsProcessor | None:
        """What holds the answer to what was asked for; None where it is free. Raises FieldError."""
        constraint = self.constraint()
        if constraint is None:
            return None
        field, kind, value = constraint
        try:
            if kind == "choice":
                return OneOf(model, value)
            return grammar.regex(model, value) if kind == "regex" else grammar.json_schema(model, value)
        except UserError as error:
            raise FieldError(field, str(error)) from None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else [each for each in self.stop or [] if each]

    @property
    def stream_name(self) -> str | None:
        """The stream asked about: of the last video part, else behind the model's last ``/``; None for the only one."""
        url = self._stream_url
        return stream_of(url)[0] if url else self.model.rpartition("/")[2] or None

    @property
    def window(self) -> dict[str, str]:
        """``since`` and ``until`` as they were given, in fields or in the stream's URL. Raises FieldError."""
        given = {name: text for name, text in (("since", self.since), ("until", self.until)) if text is not None}
        in_url = stream_of(self._stream_url)[1] if self._stream_url else {}
        if twice := given.keys() & in_url.keys():
            raise FieldError(min(twice), "the stream's URL has it too; give it once")
        return {**given, **in_url}

    @property
    def _stream_url(self) -> str:
        """Of the last video part that is a stream; empty where there is none."""
        urls = [part.url for _, part in self._media() if isinstance(part, VideoPart) and part.is_stream]
        return urls[-1] if urls else ""

    @property
    def has_pictures(self) -> bool:
        return any(isinstance(part, ImagePart) or not part.is_stream for _, part in self._media())

    def pictures(self, settings: ServerSettings, prepare: Callable[[NDArray[np.uint8]], Pixels]) -> list[Pixels]:
        """What the messages show, prepared for the model. Where that is too much, what was shown first is left out.

        Raises FieldError for what is not allowed or no picture, and where the last message alone shows too much.
        """
        last, remaining, shown = f"messages.{len(self.messages) - 1}.", settings.max_pictures, list[list[Pixels]]()
        for field, part in reversed(self._media()):
            if isinstance(part, VideoPart) and part.is_stream:
                continue
            if remaining == 0 and field.startswith(last):
                raise FieldError(field, f"a question shows {settings.max_pictures} pictures at most (server.max_pictures)")
            if remaining == 0:
                break
            try:
                if isinstance(part, ImagePart):
                    images = [media.read_picture(part.image_url.url, settings)]
                else:
                    wanted = self.media_io_kwargs.video
                    images = media.read_video(part.url, settings, min(remaining, wanted.num_frames or remaining), wanted.fps)
            except UserError as error:
                raise FieldError(field, str(error)) from None
            shown.append([prepare(image) for image in images])
            remaining -= len(images)
        return [picture for part in reversed(shown) for picture in part]

    def _media(self) -> list[tuple[str, ImagePart | VideoPart]]:
        """The parts that are no text, each with the name of its field."""
        return [
            (f"messages.{index}.content.{place}.{part.type}", part)
            for index, message in enumerate(self.messages)
            for place, part in enumerate(message.content if isinstance(message.content, list) else [])
            if not isinstance(part, TextPart)
        ]

    def question(self) -> tuple[str, list[Turn]]:
        """The last user message, and the turns before it. A system message stands before the question.

        Raises FieldError.
        """
        if self.messages[-1].role != "user":
            raise FieldError("messages", "the last message is the user's")
        system = "\n".join(each.text for each in self.messages if each.role in ("system", "developer"))
        turns: list[Turn] = []
        asked: str | None = None
        for each in self.messages[:-1]:
            if each.role == "user":
                asked = each.text
            elif each.role == "assistant" and asked is not None:
                turns.append((asked, each.text))
                asked = None
        question = self.messages[-1].text.strip()
        if not question:
            raise FieldError("messages", "the last message has no text")
        return f"{system}\n{question}".strip(), turns


def stream_of(url: str) -> tuple[str, dict[str, str]]:
    """``front-door`` and ``{"since": "10m"}`` of ``edgevlm://front-door?since=10m``. Raises FieldError."""
    match = re.fullmatch(r"(?i:edgevlm)://([^/?#]+)/?(?:\?([^#]*))?", url)
    if match is None:
        raise FieldError("video_url.url", "give a stream of this server, edgevlm://NAME")
    pairs = parse_qsl(match[2] or "", keep_blank_values=True)
    names = [name for name, _ in pairs]
    if {*names} - {"since", "until"} or len(names) > len({*names}) or not all(0 < len(text) <= 40 for _, text in pairs):
        raise FieldError("video_url.url", "behind ? there are since and until, each once: edgevlm://NAME?since=10m")
    return match[1], dict(pairs)


class TooLate(UserError):
    """A question waited for as long as the server lets one wait."""


class Completion:
    """One answer, in OpenAI's shapes."""

    def __init__(self, request: ChatRequest, stream: CameraStream, question: str, answer: Answer | str, asked: Asked) -> None:
        self.request, self.stream, self.question, self.answer, self._asked = request, stream, question, answer, asked
        self.began = time.perf_counter()
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.finish_reason = "stop"
        self.evidence: dict[str, Any] = {}
        self._too_late: asyncio.TimerHandle | None = None
        self._waited_s = 0.0  # where it was given up for that

    def give_up_after(self, seconds: float) -> None:
        """Take the question back where it still waits then: its answer raises TooLate."""

        def late() -> None:
            if not isinstance(self.answer, str) and self.answer.take_back():
                self._waited_s = seconds

        self._too_late = asyncio.get_running_loop().call_later(seconds, late)

    async def complete(self) -> dict[str, Any]:
        """The whole answer, once it is there."""
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
            last = {**self._common("chat.completion.chunk"), "choices": [], "usage": self.usage()}
            yield {"data": json.dumps(last)}
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
            if self._waited_s:
                raise TooLate(f"the question waited {self._waited_s:g} s for others and was given up; ask again later")
            if text[given:]:
                yield text[given:]
        except NothingHeld as error:
            raise FieldError("since" if self._asked.since else "until", self._asked.nothing_held(error)) from None
        finally:
            self.cancel()
        # a cancelled answer comes to its end, and thumbnails are read, while other requests go on
        self.evidence = await run_in_threadpool(self.stream.answered, self.question, self.answer)

    def cancel(self) -> None:
        """Give the answer up, where it is not finished."""
        if self._too_late is not None:
            self._too_late.cancel()
        if not isinstance(self.answer, str) and not self.answer.finished:
            self.answer.cancel()

    def usage(self) -> dict[str, Any]:
        """Tokens: the memory's count as prompt tokens that were cached."""
        if isinstance(self.answer, str):
            return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        held, said = self.stream.session.stats.tokens, len(self.answer.token_ids)
        prompt = held + self.answer.prompt_tokens
        details = {"cached_tokens": held}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": details,
        }

    def extension(self) -> dict[str, Any]:
        """What OpenAI's shape has no place for."""
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
