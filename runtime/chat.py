"""Prompts from a checkpoint's own chat template, and the conversation that is kept as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import ChatSpec
from edgevlm.runtime.sandbox import render

Turn = tuple[str, str]
MAX_CONVERSATIONS = 64


class Chat:
    """Splits what the template renders at the vision placeholder: a prefix before the stream, a suffix after it."""

    def __init__(self, spec: ChatSpec, system: str | None = None) -> None:
        self.spec, self.system = spec, system
        self.prefix, _ = self._split([], "")

    def suffix(self, turns: Sequence[Turn], question: str) -> str:
        """What follows the vision tokens: earlier turns (oldest first), the question, and the generation prompt."""
        self._check(turns, question)
        return self._split(turns, question)[1]

    def text_only(self, turns: Sequence[Turn], question: str) -> str:
        """The whole prompt where there is no video."""
        self._check(turns, question)
        return self._render(turns, question, video=False)

    def _check(self, turns: Sequence[Turn], question: str) -> None:
        for text in (question, *(part for turn in turns for part in turn)):
            if not isinstance(text, str):
                raise UserError(f"a question is text, not {type(text).__name__}")
            if self.spec.placeholder in text:
                raise UserError(f"a question cannot hold {self.spec.placeholder!r}, which stands for the video; leave it out")

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

    def _split(self, turns: Sequence[Turn], question: str) -> tuple[str, str]:
        before, placeholder, after = self._render(turns, question, video=True).partition(self.spec.placeholder)
        if not placeholder:
            raise UserError(f"the chat template renders no {self.spec.placeholder!r}, the video's place; it is another model's")
        return before + self.spec.opening, self.spec.ending + after


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


class Conversations:
    """The turns of each conversation as text: the oldest turn leaves first, and the conversation unused for longest.

    history_tokens: tokens that earlier turns may take in a prompt.
    """

    def __init__(self, chat: Chat, encode: Callable[[str], list[int]], history_tokens: int) -> None:
        self.turns: dict[str, list[Turn]] = {}
        self._chat, self._encode, self._history_tokens = chat, encode, history_tokens

    def prompt(
        self, conversation: str | None, question: str, history: Sequence[Turn] = (), *, text_only: bool = False
    ) -> list[int]:
        """Suffix ids, with as many of the newest turns as there is room for; older ones are forgotten.

        history: the turns, oldest first, where there is no ``conversation``. text_only: ids of the whole prompt without a
        video instead. Raises UserError for a template that writes none.
        """
        turns = self.turns.get(conversation, []) if conversation is not None else list(history)
        written = self._chat.text_only if text_only else self._chat.suffix
        if not (alone := len(self._encode(written([], question)))):
            raise UserError("the chat template writes no question; it is another model's")
        while True:
            ids = self._encode(written(turns, question))
            if len(ids) - alone <= self._history_tokens or not turns:
                return ids
            del turns[0]

    def add(self, conversation: str, turn: Turn) -> None:
        """Add a turn; with more than MAX_CONVERSATIONS the one unused for longest is forgotten."""
        self.turns[conversation] = [*self.turns.pop(conversation, []), turn]
        if len(self.turns) > MAX_CONVERSATIONS:
            del self.turns[next(iter(self.turns))]
