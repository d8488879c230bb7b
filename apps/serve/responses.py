"""``POST /v1/responses``: convert requests of OpenAI's Responses API to chat requests."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from edgevlm.apps.serve.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AskedModel,
    CalledFunction,
    ChatRequest,
    Content,
    Count,
    Function,
    Lenient,
    Message,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    Temperature,
    Text,
    Tool,
    ToolCall,
    ToolName,
    TopP,
    shallow,
    unknown,
)
from edgevlm.apps.serve.completion import Completion
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.serve.tools import ToolUse
from edgevlm.errors import FieldError


class TextFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextSettings(Lenient):
    format: TextFormat | None = None


class NamedFunction(Lenient):
    type: Literal["function"]
    name: ToolName


class FlatTool(Function):
    """A function that the answer may call. Tools whose ``type`` is not ``function`` are ignored."""

    type: str = "function"
    name: ToolName = "-"


class Item(Lenient):
    """A message, a function call in an earlier answer, or the result of such a call. Items of unknown types are ignored."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    id: Any = None
    status: Any = None
    call_id: Annotated[str, Field(max_length=256)] | None = None
    name: ToolName | None = None
    arguments: Text = ""
    output: Content = None

    def message(self, place: int) -> Message | None:
        """Return the item as a chat message, or None if its type is ignored. Raises FieldError if ``role`` is missing."""
        if self.type == "function_call" and self.name:
            function = CalledFunction(name=self.name, arguments=self.arguments)
            return Message(role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)])
        if self.type == "function_call_output":
            return Message(role="tool", content=self.output, tool_call_id=self.call_id)
        if self.type == "message" and self.role is None:
            raise FieldError(f"input.{place}.role", "role is missing; set user, assistant or system")
        return Message(role=self.role, content=self.content) if self.type == "message" and self.role else None


def nothing_stored(given: str | None) -> str | None:
    if given is not None:
        raise ValueError("answers are not stored; send the whole conversation as input")
    return given


class ResponsesRequest(Lenient):
    """The fields of a Responses API request that have an effect."""

    model: AskedModel = ""
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    stream: bool | None = False
    max_output_tokens: Count = None
    temperature: Temperature = None
    top_p: TopP = None
    text: TextSettings | None = None
    tools: Annotated[list[Annotated[FlatTool, BeforeValidator(shallow)]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str | None, AfterValidator(nothing_stored)] = None

    def as_chat(self) -> ChatRequest:
        """Convert this request to a chat request. Raises FieldError."""
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        said = [Message(role="system", content=self.instructions)] if self.instructions else []
        said += [message for place, item in enumerate(items) if (message := item.message(place))]
        form, choice = self.text.format if self.text is not None else None, self.tool_choice
        named = NamedTool(function=CalledFunction(name=choice.name)) if isinstance(choice, NamedFunction) else choice
        given: dict[str, Any] = {
            "model": self.model, "messages": said or [Message(role="user")], "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [Tool(type=each.type, function=each if each.type == "function" else None) for each in self.tools or ()],
            "tool_choice": named,
            "response_format": form and ResponseFormat(type=form.type, json_schema=NamedSchema(schema=form.json_schema)),
        }  # fmt: skip
        return ChatRequest(**given)

    @cached_property
    def _places(self) -> list[str]:
        """Return the name of the Responses API's field that each message of the chat request was made from."""
        items = ["input"] if isinstance(self.input, str) else [
            f"input.{place}" for place, item in enumerate(self.input) if item.message(place)
        ]  # fmt: skip
        return ["instructions", *items] if self.instructions else items

    def place_of(self, field: str) -> str:
        """Return the Responses API's own name for a field of the chat request, such as ``input`` for ``messages``."""
        field = re.sub(r"^messages\.(\d+)", lambda found: self._places[int(found[1])], field)
        return {"messages": "input", "max_completion_tokens": "max_output_tokens"}.get(field, field)

    def ignored(self) -> Iterator[str]:
        """Yield the paths of the ignored fields and items."""
        yield from unknown(self)
        items = [] if isinstance(self.input, str) else self.input
        yield from (f"input.{place}" for place, item in enumerate(items) if item.message(place) is None)


class ModelResponse(Completion):
    """One answer in the format of OpenAI's Responses API."""

    prefix = "resp_"

    def __init__(self, request: ResponsesRequest, chat: ChatRequest, stream: CameraStream) -> None:
        super().__init__(chat, stream, request.ignored())
        self._request, self._number = request, 0
        self._output: list[dict[str, Any]] = []
        self._text: str | None = None  # text of the last output item while it is unfinished

    def ask(self, settings: ServerSettings) -> None:
        own = {*self._ignored}
        try:
            super().ask(settings)
        except FieldError as error:
            raise FieldError(self._request.place_of(error.field), str(error).removeprefix(f"{error.field}: ")) from None
        self._ignored = [each if each in own else self._request.place_of(each) for each in self._ignored]

    async def complete(self) -> dict[str, Any]:
        async for _ in self._item_events():
            pass
        return self._response(finished=True)

    async def events(self) -> AsyncGenerator[dict[str, str], None]:
        yield self._event("created", response=self._response())
        async for event in self._item_events():
            yield event
        response = self._response(finished=True)
        yield self._event(response["status"], response=response)

    async def _item_events(self) -> AsyncGenerator[dict[str, str], None]:
        async for part in self.parts():
            for event in self._call(part) if isinstance(part, ToolUse) else self._say(part):
                yield event
        for event in (*(() if self._output else self._say("")), *self._end()):
            yield event

    def _say(self, piece: str) -> Iterator[dict[str, str]]:
        if self._text is None:
            self._text = ""
            yield self._event("output_item.added", **self._place, item=self._message(finished=False))
            yield self._event("content_part.added", **self._content, part=self._part())
        if piece:
            self._text += piece
            yield self._event("output_text.delta", **self._content, delta=piece, logprobs=[])

    def _end(self) -> Iterator[dict[str, str]]:
        if self._text is None:
            return
        yield self._event("output_text.done", **self._content, text=self._text, logprobs=[])
        yield self._event("content_part.done", **self._content, part=self._part())
        yield from self._finish(self._message(finished=True))
        self._text = None

    def _call(self, call: ToolUse) -> Iterator[dict[str, str]]:
        yield from self._end()
        item = {"id": call.id.replace("call_", "fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        yield self._event("output_item.added", **self._place, item={**item, "arguments": "", "status": "in_progress"})
        of = {"item_id": item["id"], **self._place}
        yield self._event("function_call_arguments.delta", **of, delta=call.arguments)
        yield self._event("function_call_arguments.done", **of, name=call.name, arguments=call.arguments)
        yield from self._finish({**item, "arguments": call.arguments, "status": "completed"})

    def _finish(self, item: dict[str, Any]) -> Iterator[dict[str, str]]:
        yield self._event("output_item.done", **self._place, item=item)
        self._output.append(item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    @property
    def _content(self) -> dict[str, Any]:
        return {"item_id": self._message_id, **self._place, "content_index": 0}

    @property
    def _message_id(self) -> str:
        return f"{self.id.replace(self.prefix, 'msg_')}{len(self._output) or ''}"

    def _event(self, kind: str, **fields: Any) -> dict[str, str]:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return {"event": name, "data": json.dumps({"type": name, "sequence_number": number, **fields})}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _message(self, *, finished: bool) -> dict[str, Any]:
        content, status = ([self._part()], "completed") if finished else ([], "in_progress")
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, *, finished: bool = False) -> dict[str, Any]:
        request, truncated, used = self._request, finished and self.finish_reason == "length", self.usage()
        echoed = request.model_dump(include={"tools", "tool_choice"}, exclude_none=True)
        return {
            "id": self.id, "object": "response", "created_at": self.created,
            "status": "incomplete" if truncated else "completed" if finished else "in_progress", "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None, "instructions": request.instructions,
            "metadata": {}, "model": request.model or self.stream.name, "temperature": request.temperature,
            "top_p": request.top_p, "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": "auto", "tools": [], **echoed, "output": self._output,
            "usage": {
                "input_tokens": used["prompt_tokens"], "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            } if finished else None,
            "edgevlm": self.extension() if finished else None,
        }  # fmt: skip
