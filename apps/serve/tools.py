"""Make a schema from the functions that an answer may call, and find calls in the answer's text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# keywords that can add properties to those that a schema lists
JOINED = {"$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A function call in an answer. ``arguments`` is a JSON string."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @classmethod
    def parse(cls, text: str, names: Sequence[str]) -> ToolUse | None:
        """Parse ``{"name": .., "arguments": {..}}``; return None for anything else, including names not in ``names``."""
        try:
            found = json.loads(text)
            name, arguments = found["name"], found.get("arguments") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        is_call = name in names and isinstance(arguments, Mapping)
        return cls(name, json.dumps(arguments, ensure_ascii=False)) if is_call else None

    def described(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a function call. ``functions``: each has a ``name`` and a schema of its ``parameters``."""
    shared: dict[str, Any] = {}
    calls = []
    for number, function in enumerate(functions):
        parameters = dict(_own_references(function["parameters"] or {"type": "object"}, f"{number}-"))
        if "properties" in parameters and not JOINED & parameters.keys():  # only the listed arguments are allowed
            parameters.setdefault("additionalProperties", False)
        for keyword in ("$defs", "definitions"):
            if isinstance(parameters.get(keyword), Mapping):
                shared |= {f"{number}-{name}": each for name, each in parameters.pop(keyword).items()}
        fields = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return {**({"anyOf": calls} if len(calls) > 1 else calls[0]), **({"$defs": shared} if shared else {})}


def _own_references(schema: Any, before: str) -> Any:
    """Copy a schema, adding the prefix ``before`` to the name of every definition that it refers to."""
    if isinstance(schema, Mapping):
        changed = {name: _own_references(each, before) for name, each in schema.items()}
        if isinstance(place := schema.get("$ref"), str):
            for keyword in ("#/$defs/", "#/definitions/"):
                if place.startswith(keyword):
                    changed["$ref"] = f"#/$defs/{before}{place.removeprefix(keyword)}"
        return changed
    return [_own_references(each, before) for each in schema] if isinstance(schema, list) else schema


class CallReader:
    """Splits an unfinished answer into text and tool calls: ``<tool_call>{..}</tool_call>``, as in Hermes and Qwen.

    ``names``: the functions that can be called; calls to other functions are returned as text.
    ``whole``: whether the answer is a single call without tags.
    ``only_one``: whether to drop everything after the first call.
    ``called``: whether a call was found.
    """

    def __init__(self, names: Sequence[str], *, whole: bool = False, only_one: bool = False) -> None:
        self._names, self._whole, self._only_one, self._text = names, whole, only_one, ""
        self.called = False

    def feed(self, piece: str) -> Iterator[str | ToolUse]:
        """Take a piece of the answer, and yield the parts it completes. Text that may be the start of a call is held back."""
        self._text += piece
        while self._names and not self._whole:
            said, mark, rest = self._text.partition(OPENING)
            if not mark:
                held = next(size for size in range(len(OPENING), -1, -1) if said.endswith(OPENING[:size]))
                self._text = said[len(said) - held :]
                yield from self._kept(said[: len(said) - held])
                return
            inside, end, after = rest.partition(CLOSING)
            yield from self._kept(said)
            self._text = mark + rest
            if not end:
                return
            yield from self._kept(ToolUse.parse(inside, self._names) or mark + inside + end)
            self._text = after
        if not self._names:
            yield from self.end()

    def end(self) -> Iterator[str | ToolUse]:
        """Yield the rest of the answer: text, or a call that has no closing tag."""
        text, self._text = self._text, ""
        yield from self._kept(ToolUse.parse(text.removeprefix(OPENING), self._names) or text)

    def _kept(self, part: str | ToolUse) -> Iterator[str | ToolUse]:
        is_call = isinstance(part, ToolUse)
        if part and not (self.called and (self._only_one or (isinstance(part, str) and not part.strip()))):
            yield part
        self.called = self.called or is_call
