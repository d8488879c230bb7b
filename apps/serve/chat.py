"""``POST /v1/chat/completions``: convert OpenAI's requests to questions about a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from edgevlm.apps.serve import media
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.serve.grammar import Grammar, writes_json
from edgevlm.apps.serve.service import field as wrong
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.serve.tools import CLOSING, OPENING, call_schema
from edgevlm.errors import FieldError, UserError
from edgevlm.runtime.chat import Dialogue
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.sampling import MAX_CHOICES, OneOf

MAX_MESSAGES = 1024
MAX_TOOLS = 256
VIDEO_FRAMES = 8  # maximum number of frames taken from a video file
DEEPEST = 64


def shallow(value: Any) -> Any:
    """Return a value unchanged, or raise ValueError if the value is nested deeper than DEEPEST levels."""
    level = [value]
    for _ in range(DEEPEST):
        level = [each for of in level for each in (of.values() if isinstance(of, dict) else of if isinstance(of, list) else ())]
    if level:
        raise ValueError(f"is nested deeper than {DEEPEST} levels")
    return value


class Strict(BaseModel):
    """A pydantic model that rejects unknown fields and values of the wrong type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lenient(BaseModel):
    """A pydantic model that ignores unknown fields, such as other servers' fields. :func:`unknown` lists unknown fields."""

    model_config = ConfigDict(extra="allow", strict=True)


def unknown(given: BaseModel, at: str = "") -> Iterator[str]:
    """Yield the path (like ``messages.0.name``) of each non-empty unknown field."""
    yield from (f"{at}{name}"[:200] for name, value in (given.model_extra or {}).items() if value not in (None, [], {}))
    for name in type(given).model_fields:
        value = getattr(given, name)
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, BaseModel):
                yield from unknown(each, f"{at}{name}.{place}." if isinstance(value, list) else f"{at}{name}.")


Text = Annotated[str, Field(max_length=65_536)]
Moment = Annotated[str, Field(min_length=1, max_length=40)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None
TopP = Annotated[float, Field(gt=0, le=1)] | None
Count = Annotated[int, Field(ge=1, le=1 << 31)] | None
Tokens = Annotated[Count, BeforeValidator(lambda value: None if value == -1 else value)]  # llama.cpp uses -1 for no limit
Penalty = Annotated[float, Field(gt=0, le=100)] | None
Added = Annotated[float, Field(ge=-2, le=2)] | None
Likeliest = Annotated[int, Field(ge=0, le=20)] | None
StopText = Annotated[str, Field(max_length=256)]
Stops = (
    Annotated[
        list[StopText], Field(max_length=64), BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ]
    | None
)  # fmt: skip
ASKED_STREAM = (
    "The stream's name, or text ending in `/NAME`. A video part may name the stream instead. The default is the only stream."
)
ToolName = Annotated[str, Field(min_length=1, max_length=256)]
AskedModel = Annotated[str, Field(max_length=512, description=ASKED_STREAM)]
ChoiceTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=2, max_length=MAX_CHOICES)]


class Url(Lenient):
    url: str = Field(validation_alias=AliasChoices("url", "data"))  # llama.cpp's input_video names this field data


class Part(Lenient):
    """A message's text, picture (`data:`, or `http(s):` from an allowed host) or video (`edgevlm://NAME`, `data:`, or a file in
    an allowed folder).

    `input_video` is from llama.cpp; `input_text`, `output_text` and `input_image` are from the Responses API.
    """

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
        return not self.is_picture and self.url[:8].lower() == "edgevlm:"


Content = Text | Annotated[list[Part], Field(max_length=1024, fail_fast=True)] | None


class CalledFunction(Lenient):
    name: ToolName
    arguments: Text | Annotated[dict[str, Any], AfterValidator(shallow)] = ""


class ToolCall(Lenient):
    """A function call made in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments: Any = self.function.arguments
        with suppress(ValueError, RecursionError):
            arguments = shallow(json.loads(arguments)) if isinstance(arguments, str) else arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(each.text for each in self.content if each.is_text)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        roles = {"developer": "system", "function": "tool"}
        message: dict[str, Any] = {"role": roles.get(self.role, self.role), "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message | ({"tool_call_id": self.tool_call_id} if self.role == "tool" else {})


class Function(Lenient):
    """A function that the answer may call. ``strict`` has no effect: a required call always follows the schema."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """A tool that the answer may use. Tools of types other than ``function`` are ignored."""

    type: str = "function"
    function: Function | None = None


class NamedTool(Lenient):
    type: Literal["function"] = "function"
    function: CalledFunction


class StreamOptions(Lenient):
    include_usage: bool | None = False


class NamedSchema(Lenient):
    """A named JSON schema that the answer follows, whether or not ``strict`` is set."""

    json_schema: dict[str, Any] | bool = Field(default=True, alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's field for structured answers."""

    choice: ChoiceTexts | None = None


def one_answer(number: int | None) -> int | None:
    if number not in (None, 1):
        raise ValueError("must be 1; for another answer, send the request again with another seed")
    return number


class Asked(Lenient):
    """Request fields of OpenAI, vLLM and llama.cpp that chat and text completions share."""

    model: AskedModel = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Penalty = Field(None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"))
    presence_penalty: Added = None
    frequency_penalty: Added = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    stop: Stops = None
    n: Annotated[int | None, AfterValidator(one_answer)] = 1
    since: Moment | None = Field(None, description="Use only frames from this time on: `10m`, `14:03` or RFC 3339.")
    until: Moment | None = Field(None, description="Use only frames up to this time, written like `since`.")


class ChatRequest(Asked):
    """The fields of a chat completion request that have an effect."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Tokens = None
    logprobs: bool | None = False
    top_logprobs: Likeliest = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Annotated[list[Annotated[Tool, BeforeValidator(shallow)]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = Field(None, description="Continue the last message, which is the assistant's.")

    @property
    def is_plain(self) -> bool:
        """Whether the question has no pictures and needs no grammar."""
        return not (self._restriction or self.must_call) and all(part.is_stream for _, part in self._parts())

    def sampling(self, stream: CameraStream, settings: ServerSettings, asked: Dialogue) -> tuple[dict[str, Any], list[str]]:
        """Return the arguments for :meth:`Session.ask`, and the names of the request's ignored fields. Raises FieldError."""
        given: dict[str, Any] = {
            "temperature": self.temperature or 0.0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k or 0, 0),
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "seed": None if self.seed == -1 else self.seed,
        }
        if wanted := self.longest:
            given["max_tokens"] = min(wanted, stream.session.text_budget.answer)
        if self.must_call and writes_json(stream.model):
            with wrong("tools"):
                given["logits_processor"] = Grammar(stream.model, call_schema([each.model_dump() for each in self.functions]))
        elif self._restriction:
            field, kind, form = self._restriction
            with wrong(field):
                if form is None:
                    raise UserError("schema is missing; add json_schema.schema")
                given["logits_processor"] = kind(stream.model, form)
        pictures, ignored = self._pictures(stream, settings, asked)
        return given | ({"pictures": pictures} if pictures else {}), ignored

    @property
    def longest(self) -> int | None:
        """The maximum number of tokens in the answer, or None for no limit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def _restriction(self) -> tuple[str, type[OneOf] | type[Grammar], Any] | None:
        """Return the name of the field that restricts the answer, the logits processor and its argument, or None."""
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
        return [each for each in self.stop or [] if each]

    @property
    def _asked(self) -> tuple[str, dict[str, str]]:
        """Return the stream's name and time window from the last ``edgevlm://`` URL, or empty values. Raises FieldError."""
        urls = [part.url for _, part in self._parts() if part.is_stream]
        return stream_of(urls[-1]) if urls else ("", {})

    @property
    def stream_name(self) -> str | None:
        """The stream's name, from the last ``edgevlm://`` URL or else from ``model``; None means the only stream."""
        return self._asked[0] or self.model.rpartition("/")[2] or None

    @property
    def window(self) -> dict[str, str]:
        """The time window's ``since`` and ``until``, from the stream's URL or else from the fields. Raises FieldError."""
        return {"since": self.since or "", "until": self.until or "", **self._asked[1]}

    def _pictures(self, stream: CameraStream, settings: ServerSettings, asked: Dialogue) -> tuple[list[Pixels], list[str]]:
        """Return the newest pictures, up to the limit, and the names of the fields with older pictures, which are ignored.

        Raises FieldError for a forbidden or unreadable picture, and if the last message has too many pictures.
        """
        last, shown, left = f"messages.{len(self.messages) - 1}.", list[Pixels](), list[str]()
        parts = [(field, part) for field, part in reversed(self._parts()) if not part.is_stream]
        if not parts:
            return shown, left
        beside = Dialogue.of([], "") if stream.model.is_demo else asked.without(max(asked.turns - 1, 0))
        most = min(settings.max_pictures, stream.session.most_pictures(beside))
        for field, part in parts:
            if len(shown) == most and not field.startswith(last):
                left.append(field)
                continue
            with wrong(field):
                if len(shown) == most:
                    why = "server.max_pictures" if most == settings.max_pictures else "no room left by its text"
                    raise UserError(f"a question can contain at most {most} pictures (limit: {why})")
                if part.is_picture:
                    images = [media.read_picture(part.url, settings)]
                else:
                    images = media.read_video(part.url, settings, min(most - len(shown), VIDEO_FRAMES))
            shown = [*(stream.session.prepare(image) for image in images), *shown]
        return shown, left

    def _parts(self) -> list[tuple[str, Part]]:
        return [
            (f"messages.{index}.content.{place}.{part.type}", part)
            for index, message in enumerate(self.messages)
            for place, part in enumerate(message.content if isinstance(message.content, list) else [])
            if not part.is_text
        ]

    @property
    def functions(self) -> list[Function]:
        """The functions that the answer may call. Raises FieldError if ``tool_choice`` is not in ``tools``."""
        given = [] if self.tool_choice == "none" else [each.function for each in self.tools or () if each.function is not None]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            given = [each for each in given if each.name == name]
            if not given:
                raise FieldError("tool_choice", f"tool {name!r} not found in tools; add it there")
        return given

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto") and bool(self.functions)

    def dialogue(self, stream: CameraStream) -> tuple[Dialogue, list[str]]:
        """Return the messages for the chat template, and the request's known fields that have no effect. Raises FieldError.

        If the template does not support tools, tool results become user messages and tool calls become assistant text. If the
        request has no tools or the template does not support them, system messages are put before the user's last message.
        """
        last, is_demo = self.messages[-1], stream.model.is_demo
        shows = isinstance(last.content, list) and not all(part.is_text for part in last.content)
        if last.role == "user" and not (shows or last.text.strip()):
            raise FieldError("messages", "the last message contains no text or picture; add one")
        ignored = [*self._without_effect(stream)]
        if is_demo:  # the demo model was trained on single questions, not on conversations
            asked = next((place for place in range(len(self.messages) - 1, -1, -1) if self.messages[place].role == "user"), 0)
            ignored += [f"messages.{place}" for place in range(len(self.messages)) if place != asked]
            return Dialogue.of([], self.messages[asked].text.strip()), ignored
        continues = bool(self.continue_final_message) and last.role == "assistant" and bool(last.text.strip())
        messages = [each.for_template() for each in self.messages]
        has_calls = any(each["role"] == "tool" or "tool_calls" in each for each in messages)
        given = [] if self.tool_choice == "none" else [each for each in self.tools or () if each.function is not None]
        tools = [each.model_dump(exclude_none=True) for each in given]
        if (tools or has_calls) and stream.session.chat.knows_tools:
            system = "\n".join(each["content"] for each in messages if each["role"] == "system")
            said = [{"role": "system", "content": system}] if system else []
            said += [each for each in messages if each["role"] != "system"]
            opening = f"{OPENING}\n" if self.must_call and writes_json(stream.model) else ""
            return Dialogue(tuple(said), tuple(tools), continues, opening), ignored
        return Dialogue(tuple(_plain(messages)), continues=continues), ignored

    def _without_effect(self, stream: CameraStream) -> Iterator[str]:
        """Yield the request's known fields that have no effect."""
        yield from (f"tools.{place}" for place, each in enumerate(self.tools or ()) if each.function is None)
        knows, forced = stream.session.chat.knows_tools, self.must_call and writes_json(stream.model)
        if self.tool_choice != "none" and self.tools and not knows:
            yield "tools"
        if self.tool_choice not in (None, "none", "auto") and not forced:
            yield "tool_choice"
        elif knows and not forced and any(each.strict for each in self.functions):
            yield "tools.function.strict"
        if self.parallel_tool_calls is not None and self.tools and (not knows or (forced and self.parallel_tool_calls)):
            yield "parallel_tool_calls"
        if forced and self._restriction:
            yield self._restriction[0]
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs"
        if (self.longest or 0) > stream.session.text_budget.answer:
            yield "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        if self.continue_final_message and self.messages[-1].role != "assistant":
            yield "continue_final_message"


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge messages so that user and assistant alternate; put the system messages' text before the user's last message."""
    said: list[dict[str, Any]] = []
    for each in messages:
        calls = [f"{OPENING}{json.dumps(call['function'], ensure_ascii=False)}{CLOSING}" for call in each.get("tool_calls", ())]
        text, role = "\n".join(filter(None, [each["content"], *calls])), "assistant" if each["role"] == "assistant" else "user"
        if each["role"] == "system":
            continue
        if said and said[-1]["role"] == role:
            said[-1]["content"] = "\n".join(filter(None, [said[-1]["content"], text]))
        else:
            said.append({"role": role, "content": text})
    system = "\n".join(each["content"] for each in messages if each["role"] == "system")
    asked = next((each for each in reversed(said) if each["role"] == "user"), None)
    if asked is None:
        return [{"role": "user", "content": system.strip()}, *said]
    asked["content"] = f"{system}\n{asked['content']}".strip()
    return said


def one_prompt(given: Any) -> Any:
    if isinstance(given, list) and len(given) != 1:
        raise ValueError("must be one text; send a request for each text")
    return given[0] if isinstance(given, list) else given


class TextRequest(Asked):
    """A request to OpenAI's legacy completions API. The prompt becomes a user message."""

    prompt: Annotated[
        Text, BeforeValidator(one_prompt),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 1}]}),
    ]  # fmt: skip
    logprobs: Likeliest = None

    def as_chat(self) -> ChatRequest:
        """Convert this request to a chat request."""
        given: dict[str, Any] = {name: getattr(self, name) for name in Asked.model_fields}
        given |= {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs}
        return ChatRequest(messages=[Message(role="user", content=self.prompt)], **given)


def stream_of(url: str) -> tuple[str, dict[str, str]]:
    """Parse ``edgevlm://front-door?since=10m`` into ``front-door`` and ``{"since": "10m"}``. Raises FieldError."""
    match = re.fullmatch(r"(?i:edgevlm)://([^/?#]+)/?(?:\?([^#]*))?", url)
    window = dict(parse_qsl(match[2] or "", keep_blank_values=True)) if match else {}
    if match is None or window.keys() - {"since", "until"} or not all(0 < len(text) <= 40 for text in window.values()):
        raise FieldError("video_url.url", "not a stream's address; use edgevlm://NAME or edgevlm://NAME?since=10m&until=5m")
    return unquote(match[1]), window
