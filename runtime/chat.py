"""Make prompts with a checkpoint's chat template, and keep conversations as text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from edgevlm.errors import UserError, is_fault
from edgevlm.runtime.bundle import ChatSpec
from edgevlm.runtime.sandbox import render

Turn = tuple[str, str]
Message = Mapping[str, Any]
MAX_CONVERSATIONS = 64
LONGEST = 1 << 19  # the maximum length of a conversation in a prompt, in characters


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation that the caller stores and always passes in full.

    ``messages``: dicts in the format of chat templates, with ``role`` and ``content``. In a message with tool calls,
    ``content`` is None, and each call's ``arguments`` are an object, not a string. ``tools``: functions in OpenAI's format, for
    a template that supports tools. ``continues``: whether the answer continues the last message, which must then be the
    assistant's. ``opening``: the text with which the answer begins.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    continues: bool = False
    opening: str = ""

    @classmethod
    def of(cls, turns: Sequence[Turn], question: str) -> Dialogue:
        said = [each for asked, answer in turns for each in (("user", asked), ("assistant", answer))]
        return cls(tuple({"role": role, "content": text} for role, text in [*said, ("user", question)]))

    @property
    def text(self) -> str:
        """The user's last message."""
        return next((each["content"] or "" for each in reversed(self.messages) if each["role"] == "user"), "")

    def with_text(self, text: str) -> Dialogue:
        last = max((place for place, each in enumerate(self.messages) if each["role"] == "user"), default=len(self.messages))
        said = ({**each, "content": text} if place == last else each for place, each in enumerate(self.messages))
        return replace(self, messages=tuple(said))

    @property
    def size(self) -> int:
        """The number of characters in the messages and tool calls."""
        return sum(map(len, _strings(self.messages)))

    @property
    def turns(self) -> int:
        """The number of messages from the user."""
        return sum(each["role"] == "user" for each in self.messages)

    def without(self, turns: int) -> Dialogue:
        """Return the dialogue without its oldest turns. Each user message starts a turn."""
        starts = [place for place, each in enumerate(self.messages) if each["role"] == "user"]
        first = starts[turns] if turns else 0
        system = (each for each in self.messages[:first] if each["role"] == "system")
        return replace(self, messages=(*system, *self.messages[first:]))


class Chat:
    """Makes prompts in two parts: a prefix before the stream, and a suffix after it.

    A prompt is encoded whole and then split at the video's token, because tokenizers treat the start of a text differently.
    """

    def __init__(self, spec: ChatSpec, tokenizer: Tokenizer, system: str | None = None) -> None:
        self.spec, self.system, self._tokenizer = spec, system, tokenizer
        self._mark = video_mark(tokenizer, spec)
        if system is not None:
            self._check(Dialogue.of([], system))
        self.prefix_text, _ = self._parts(Dialogue.of([], ""))
        self.prefix, _ = self._split(Dialogue.of([], ""))

    @cached_property
    def knows_tools(self) -> bool:
        """Return whether the template's output includes the tools passed to it."""
        name = "a_tool_that_is_none"
        function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            return name in self._render(
                replace(Dialogue.of([], ""), tools=({"type": "function", "function": function},)), video=False
            )
        except UserError:
            return False

    def suffix(self, turns: Sequence[Turn], question: str | Dialogue) -> list[int]:
        """Return the token ids that follow the stream: earlier turns, oldest first, then the question and the generation
        prompt.
        """
        return self._split(self._checked(turns, question))[1]

    def text_only(self, turns: Sequence[Turn], question: str | Dialogue) -> list[int]:
        """Return the token ids of a whole prompt without a video."""
        return self._encode(self._render(self._checked(turns, question), video=False))

    def text(self, turns: Sequence[Turn], question: str, video: str) -> str:
        """Return the prompt as text. ``video``: the text that stands for the video. Raises UserError if the template omits the
        video.
        """
        return video.join(self._parts(Dialogue.of(turns, question)))

    def ids(self, turns: Sequence[Turn], question: str, video: str) -> list[int]:
        """Return the prompt as token ids. Takes the same arguments as :meth:`text`."""
        return self._encode(self.text(turns, question, video))

    def _checked(self, turns: Sequence[Turn], question: str | Dialogue) -> Dialogue:
        asked = question if isinstance(question, Dialogue) else Dialogue.of(turns, question)
        self._check(asked)
        return asked

    def _check(self, asked: Dialogue) -> None:
        for message in asked.messages:
            text = message["content"]
            if not (isinstance(text, str) or (text is None and message.get("tool_calls"))):
                raise UserError(f"a question must be text, not {type(text).__name__}")
        for text in _strings([*asked.messages, *asked.tools]):
            if found := next((word for word in (self.spec.placeholder, self._mark) if word and word in text), None):
                raise UserError(f"a prompt cannot contain {found!r}, the video placeholder; remove it")

    def _render(self, asked: Dialogue, *, video: bool, ends: bool = False) -> str:
        messages: list[dict[str, Any]] = []
        if self.system is not None and asked.messages[0]["role"] != "system":
            messages.append({"role": "system", "content": [_text(self.system)]})
        for message in asked.messages:
            shown = [{"type": self.spec.content_type}] if video and message["role"] == "user" else []
            video = video and not shown
            text = message["content"] or ""
            is_plain = message["role"] == "tool" or message.get("tool_calls")  # tool messages hold plain text
            messages.append({**message, "content": text if is_plain else [*shown, _text(text)]})
        tools = {"tools": list(asked.tools)} if asked.tools else {}
        special, adds = self.spec.special_tokens, not (asked.continues or ends)
        text = render(self.spec.template, messages=messages, add_generation_prompt=adds, **tools, **special)
        if asked.continues:
            last = str(asked.messages[-1]["content"]).strip()
            if last not in text:
                raise UserError("the chat template changes the last message, so it cannot be continued; send a question last")
            text = text[: text.rindex(last) + len(last)]
        return text + asked.opening

    def _parts(self, asked: Dialogue) -> tuple[str, str]:
        """Return the prompt's text before the video and the text after it.

        The video is in the user's first message or in a new message. A request's tools and system messages come after the
        video, because the prefix already in the memory has neither.
        """
        if asked.messages[0]["role"] == "user" and not asked.tools:
            before, placeholder, after = self._render(asked, video=True).partition(self.spec.placeholder)
        else:
            alone = self._render(Dialogue.of([], ""), video=True, ends=True)
            before, placeholder, after = alone.partition(self.spec.placeholder)
            after += self._render(asked, video=False).removeprefix(self.spec.special_tokens.get("bos_token") or "")
        if not placeholder:
            raise UserError(f"the chat template omits {self.spec.placeholder!r}, the video token; use the model's own")
        return before + self.spec.opening, self.spec.ending + after

    def _split(self, asked: Dialogue) -> tuple[list[int], list[int]]:
        before, after = self._parts(asked)
        if not self._mark:
            return self._encode(before), encode(self._tokenizer, after)
        ids = self._encode(before + self._mark + after)
        place = _place(ids, self.spec)
        return ids[:place], ids[place + 1 :]

    def _encode(self, text: str) -> list[int]:
        """Encode a whole prompt as transformers does: add special tokens unless the prompt begins with ``bos_token``."""
        begins = text.startswith(self.spec.special_tokens.get("bos_token") or "\0")
        return encode(self._tokenizer, text, special=self.spec.adds_special and not begins)


def video_mark(tokenizer: Tokenizer, spec: ChatSpec) -> str:
    """Return the token that stands for the video in a prompt, as text, or an empty text if the tokenizer has none."""
    token = tokenizer.get_added_tokens_decoder().get(spec.placeholder_id)
    return "" if token is None else token.content


def encode_inside(tokenizer: Tokenizer, spec: ChatSpec, text: str) -> list[int]:
    """Encode text that follows the video token in a prompt. Raises the same errors as :func:`encode`."""
    mark = video_mark(tokenizer, spec)
    ids = encode(tokenizer, mark + text)
    return ids[_place(ids, spec) + 1 :] if mark else ids


def _place(ids: list[int], spec: ChatSpec) -> int:
    if (found := ids.count(spec.placeholder_id)) != 1:
        what = "the tokenizer merges the video token with the text next to it; save it as a special token"
        raise UserError("a question cannot contain the video token; remove it" if found else what)
    return ids.index(spec.placeholder_id)


def encode(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """Return a text's token ids. ``special``: whether to include the special tokens that the tokenizer adds.

    Raises UserError for text with lone surrogates, which stand for bytes that are not UTF-8, and if the tokenizer fails.
    """
    try:
        text.encode()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        return ids
    except UnicodeEncodeError as error:
        raise UserError(f"the text contains {text[error.start]!a}, which is not valid Unicode; send UTF-8") from None
    except BaseException as error:
        if not is_fault(error):
            raise
        raise UserError(f"the tokenizer cannot encode this text ({error}); rephrase it, or export the model again") from None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _strings(each)


class Conversations:
    """The turns of each conversation, as text. The oldest turns and the least recently used conversations are dropped first.

    ``history_tokens``: the maximum number of tokens that earlier turns take in a prompt. ``most``: if not 0, the maximum number
    of tokens in earlier turns and question together; ``history_tokens`` is then ignored. ``dropped``: the number of turns that
    did not fit in the newest prompt.
    """

    def __init__(self, chat: Chat, history_tokens: int, most: int = 0) -> None:
        self.turns: dict[str, list[Turn]] = {}
        self.dropped = 0
        self._chat, self._history_tokens, self._most = chat, history_tokens, most

    def prompt(
        self,
        conversation: str | None,
        question: str | Dialogue,
        history: Sequence[Turn] = (),
        *,
        text_only: bool = False,
        taken: int = 0,
    ) -> list[int]:
        """Return the token ids of a prompt's suffix, with the newest turns that fit. The conversation's older turns are
        deleted.

        ``history``: the earlier turns, oldest first, used if ``conversation`` is None. ``text_only``: instead of the suffix,
        return a whole prompt that has no video. ``taken``: the number of tokens already in use. Raises UserError if the
        template omits the question or the video.
        """
        known = self.turns.get(conversation, []) if conversation is not None else history
        asked = question if isinstance(question, Dialogue) else Dialogue.of(known, question)
        most = max(asked.turns - 1, 0)
        written = self._chat.text_only if text_only else self._chat.suffix
        prompts: dict[int, list[int]] = {}

        def prompt(dropped: int) -> list[int]:
            return prompts.get(dropped) or prompts.setdefault(dropped, written([], asked.without(dropped)))

        if not (alone := len(prompt(most))):
            raise UserError("the chat template omits the question; use the model's own template")
        room = self._most - taken if self._most else alone + self._history_tokens
        first = bisect_left(range(most), True, key=lambda dropped: asked.without(dropped).size <= LONGEST)
        self.dropped = bisect_left(range(most), True, first, key=lambda dropped: len(prompt(dropped)) <= room)
        if conversation is not None and conversation in self.turns:
            self.turns[conversation] = list(known[self.dropped :])
        return prompt(self.dropped)

    def add(self, conversation: str, turn: Turn) -> None:
        """Add a turn to a conversation. If there are too many conversations, the least recently used one is deleted."""
        self.turns[conversation] = [*self.turns.pop(conversation, []), turn]
        if len(self.turns) > MAX_CONVERSATIONS:
            del self.turns[next(iter(self.turns))]
