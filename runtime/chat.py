"""Prompts from a checkpoint's own chat template, and the conversation that is kept as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import ChatSpec
from edgevlm.runtime.sandbox import render

Turn = tuple[str, str]
MAX_CONVERSATIONS = 64


class Chat:
    """Renders prompts and encodes them: token ids of a prefix before the stream and of a suffix after it.

    A prompt is encoded whole and split at the token that stands for the video: tokenizers treat a text's beginning differently.
    """

    def __init__(self, spec: ChatSpec, tokenizer: Tokenizer, system: str | None = None) -> None:
        self.spec, self.system, self._tokenizer = spec, system, tokenizer
        self._mark = video_mark(tokenizer, spec)
        if system is not None:
            self._check(system)
        self.prefix_text, _ = self._parts([], "")
        self.prefix, _ = self._split([], "")

    def suffix(self, turns: Sequence[Turn], question: str) -> list[int]:
        """Return the ids after the vision tokens: earlier turns (oldest first), the question, and the generation prompt."""
        self._check(question, *(part for turn in turns for part in turn))
        return self._split(turns, question)[1]

    def text_only(self, turns: Sequence[Turn], question: str) -> list[int]:
        """Return the ids of the whole prompt where there is no video."""
        self._check(question, *(part for turn in turns for part in turn))
        return self._encode(self._render(turns, question, video=False))

    def text(self, turns: Sequence[Turn], question: str, video: str) -> str:
        """Return the whole prompt as text, with ``video`` in the video's place. Raises UserError for a template without one."""
        return video.join(self._parts(turns, question))

    def ids(self, turns: Sequence[Turn], question: str, video: str) -> list[int]:
        """Return the token ids of :meth:`text`."""
        return self._encode(self.text(turns, question, video))

    def _check(self, *texts: str) -> None:
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"a question is text, not {type(text).__name__}")
            if found := next((word for word in (self.spec.placeholder, self._mark) if word and word in text), None):
                raise UserError(f"a prompt cannot hold {found!r}, which stands for the video; leave it out")

    def _render(self, turns: Sequence[Turn], question: str, video: bool) -> str:
        questions = [*(turn[0] for turn in turns), question]
        answers = [turn[1] for turn in turns]
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": [_text(self.system)]})
        for index, text in enumerate(questions):
            shown = [{"type": self.spec.content_type}] if video and index == 0 else []
            messages.append({"role": "user", "content": [*shown, _text(text)]})
            if index < len(answers):
                messages.append({"role": "assistant", "content": [_text(answers[index])]})
        return render(self.spec.template, messages=messages, add_generation_prompt=True, **self.spec.special_tokens)

    def _parts(self, turns: Sequence[Turn], question: str) -> tuple[str, str]:
        before, placeholder, after = self._render(turns, question, video=True).partition(self.spec.placeholder)
        if not placeholder:
            raise UserError(f"the chat template does not write {self.spec.placeholder!r} for the video; use this model's own")
        return before + self.spec.opening, self.spec.ending + after

    def _split(self, turns: Sequence[Turn], question: str) -> tuple[list[int], list[int]]:
        before, after = self._parts(turns, question)
        if not self._mark:
            return self._encode(before), encode(self._tokenizer, after)
        ids = self._encode(before + self._mark + after)
        place = _place(ids, self.spec)
        return ids[:place], ids[place + 1 :]

    def _encode(self, text: str) -> list[int]:
        """Encode a whole prompt as the processors of transformers do, with special tokens unless it begins with the first."""
        begins = text.startswith(self.spec.special_tokens.get("bos_token") or "\0")
        return encode(self._tokenizer, text, special=self.spec.adds_special and not begins)


def video_mark(tokenizer: Tokenizer, spec: ChatSpec) -> str:
    """Return the text of the video's placeholder token; empty for a tokenizer without one."""
    token = tokenizer.get_added_tokens_decoder().get(spec.placeholder_id)
    return "" if token is None else token.content


def encode_inside(tokenizer: Tokenizer, spec: ChatSpec, text: str) -> list[int]:
    """Encode text inside a prompt, after a token of the video. Raises UserError as :func:`encode` does."""
    mark = video_mark(tokenizer, spec)
    ids = encode(tokenizer, mark + text)
    return ids[_place(ids, spec) + 1 :] if mark else ids


def _place(ids: list[int], spec: ChatSpec) -> int:
    """Return the index of the video's token. Raises UserError if it is missing or not the only one."""
    if (found := ids.count(spec.placeholder_id)) != 1:
        what = "the tokenizer joins the video's token to the text beside it; save it as a special token"
        raise UserError("a question cannot hold the token that stands for the video; leave it out" if found else what)
    return ids.index(spec.placeholder_id)


def encode(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """Encode ``text`` to token ids. special: with what the tokenizer's post-processor adds.

    Raises UserError for text that is not Unicode: a lone surrogate, as bytes that are not UTF-8 become.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text holds {text[error.start]!a}, which is not valid Unicode; send UTF-8") from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


class Conversations:
    """The turns of each conversation as text: the oldest turn leaves first, and the conversation unused for longest.

    history_tokens: tokens that earlier turns may take in a prompt.
    """

    def __init__(self, chat: Chat, history_tokens: int) -> None:
        self.turns: dict[str, list[Turn]] = {}
        self._chat, self._history_tokens = chat, history_tokens

    def prompt(
        self, conversation: str | None, question: str, history: Sequence[Turn] = (), *, text_only: bool = False
    ) -> list[int]:
        """Suffix ids, with as many of the newest turns as there is room for; older ones are forgotten.

        history: the turns, oldest first, where there is no ``conversation``. text_only: ids of the whole prompt without a
        video instead. Raises UserError for a template that writes none.
        """
        turns = self.turns.get(conversation, []) if conversation is not None else list(history)
        written = self._chat.text_only if text_only else self._chat.suffix
        if not (alone := len(written([], question))):
            raise UserError("the chat template leaves the question out; use this model's own template")
        while True:
            ids = written(turns, question)
            if len(ids) - alone <= self._history_tokens or not turns:
                return ids
            del turns[0]

    def add(self, conversation: str, turn: Turn) -> None:
        """Add a turn; with more than MAX_CONVERSATIONS the one unused for longest is forgotten."""
        self.turns[conversation] = [*self.turns.pop(conversation, []), turn]
        if len(self.turns) > MAX_CONVERSATIONS:
            del self.turns[next(iter(self.turns))]
