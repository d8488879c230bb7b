"""``POST /v1/responses``: OpenAI's newer requests, asked as chat completions are."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from edgevlm.apps.serve.chat import (
    MAX_MESSAGES,
    AskedModel,
    ChatRequest,
    Completion,
    Count,
    Lenient,
    Message,
    NamedSchema,
    Temperature,
    Text,
    TopP,
)  # fmt: skip
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.errors import FieldError


class TextFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextSettings(Lenient):
    format: TextFormat | None = None


class ResponsesRequest(Lenient):
    """OpenAI's fields that mean something here."""

    model: AskedModel = ""
    input: Text | Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    stream: bool | None = False
    max_output_tokens: Count = None
    temperature: Temperature = None
    top_p: TopP = None
    text: TextSettings | None = None

    def as_chat(self) -> ChatRequest:
        """The same question as a chat completion. Raises FieldError."""
        form = self.text.format if self.text is not None else None
        said: list[Any] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said += [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        try:
            chat = ChatRequest.model_validate({
                "model": self.model, "messages": said, "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature, "top_p": self.top_p,
                "response_format": form and {"type": form.type, "json_schema": {"schema": form.json_schema}},
            })  # fmt: skip
            chat.question()
        except (ValidationError, FieldError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error).removeprefix("messages: ")
            raise FieldError("input", why) from None
        return chat


class ModelResponse(Completion):
    """One answer in the shapes of this interface."""

    def __init__(self, request: ResponsesRequest, chat: ChatRequest, stream: CameraStream) -> None:
        super().__init__(chat, stream)
        self._request, self._text, self._number = request, "", 0
        self._message_id = self.id.replace("chatcmpl-", "msg_")

    async def complete(self) -> dict[str, Any]:
        self._text = "".join([piece async for piece in self.pieces()])
        return self._response(finished=True)

    async def events(self) -> AsyncGenerator[dict[str, str], None]:
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield self._event("created", response=self._response())
        yield self._event("output_item.added", output_index=0, item=self._message(finished=False))
        yield self._event("content_part.added", **place, part=self._part())
        async for piece in self.pieces():
            self._text += piece
            yield self._event("output_text.delta", **place, delta=piece, logprobs=[])
        yield self._event("output_text.done", **place, text=self._text, logprobs=[])
        yield self._event("content_part.done", **place, part=self._part())
        yield self._event("output_item.done", output_index=0, item=self._message(finished=True))
        response = self._response(finished=True)
        yield self._event(response["status"], response=response)

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
        return {
            "id": self.id.replace("chatcmpl-", "resp_"), "object": "response", "created_at": self.created,
            "status": "incomplete" if truncated else "completed" if finished else "in_progress", "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None, "instructions": request.instructions,
            "metadata": {}, "model": request.model or self.stream.name, "temperature": request.temperature,
            "top_p": request.top_p, "parallel_tool_calls": False, "tool_choice": "none", "tools": [],
            "output": [self._message(finished=True)] if finished else [],
            "usage": {
                "input_tokens": used["prompt_tokens"], "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            } if finished else None,
            "edgevlm": self.extension() if finished else None,
        }  # fmt: skip
