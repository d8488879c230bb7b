"""An answer that is one of several texts, and the probability of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.evidence import QuestionAttention
from edgevlm.runtime.model import Model

MAX_CHOICES = 256


class Classified(NamedTuple):
    """How probable each choice was as the answer to a question, and where the question looked.

    time_s: the stream's time at the newest frame it saw.
    """

    time_s: float
    probabilities: dict[str, float]
    looked: QuestionAttention


class OneOf:
    """A logits processor that leaves the tokens of ``texts`` alone, each with and without a space before it.

    probabilities: of the texts, which sum to 1. They are told apart along the answer's tokens: texts that begin with the same
    token share its probability evenly, unless the answer goes that way.
    """

    def __init__(self, model: Model, texts: Sequence[str]) -> None:
        """Raises UserError for other than 2 to MAX_CHOICES texts, and for those that the tokenizer cannot tell apart."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError("choices are a list of texts")
        if not 2 <= len(texts) <= MAX_CHOICES:
            raise UserError(f"give 2 to {MAX_CHOICES} choices, not {len(texts)}")
        self.probabilities = dict.fromkeys(texts, 0.0)
        unknown = getattr(model.tokenizer.model, "unk_token", None)
        unknown_id = None if unknown is None else model.tokenizer.token_to_id(unknown)
        self._text: dict[tuple[int, ...], str] = {}  # by the tokens that write it
        for text in texts:
            for written in (model.encode(text), model.encode(f" {text}")):
                if not text.strip() or unknown_id in written or model.bundle.chat.placeholder_id in written:
                    raise UserError(f"choice {text!r}: the model has no words for it")
                if self._text.setdefault(tuple(written), text) != text:
                    raise UserError(f"choices {text!r} and {self._text[tuple(written)]!r} are the same to the model")
        if len(self.probabilities) < len(texts):
            raise UserError("the same choice stands twice")
        self.max_tokens = max(map(len, self._text))
        self._stop = model.bundle.chat.stop_ids[0]
        self._mass = dict.fromkeys(self._text, 1 / len(self._text))

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits ``[vocabulary]`` of the token after ``token_ids``: minus infinity for those that lead to no choice.

        The probabilities become those that the logits make them.
        """
        after = {ids: ids[len(token_ids)] if len(ids) > len(token_ids) else self._stop for ids in self._open(token_ids)}
        allowed = np.array(sorted(set(after.values())))
        weights = np.exp(logits[allowed].astype(np.float64) - logits[allowed].max())
        probability = dict(zip(allowed.tolist(), weights / weights.sum(), strict=True))
        sharing, mass = Counter(after.values()), sum(self._mass[ids] for ids in after)
        self._mass = self._mass | {ids: mass * float(probability[token]) / sharing[token] for ids, token in after.items()}
        self.probabilities = dict.fromkeys(self.probabilities, 0.0)
        for ids, mass in self._mass.items():
            self.probabilities[self._text[ids]] += mass
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def at_once(self, logits: NDArray[np.float32]) -> dict[str, float]:
        """The probability of each text by logits ``[vocabulary]`` of the answer's first token alone."""
        first = copy(self)
        first([], logits)
        return first.probabilities

    def check_first_tokens(self) -> None:
        """Raise UserError for texts that begin with the same token."""
        begins: dict[int, str] = {}
        for ids, text in self._text.items():
            if (other := begins.setdefault(ids[0], text)) != text:
                raise UserError(f"choices {other!r} and {text!r} begin alike to the model; word one of them differently")

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Whether ``token_ids`` write a choice that no other begins with."""
        return self._open(token_ids) == [tuple(token_ids)]

    def text(self, token_ids: Sequence[int]) -> str:
        """The choice that ``token_ids`` write; nothing for those that write none yet."""
        return self._text.get(tuple(token_ids), "")

    def _open(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """What may still be written after ``token_ids``."""
        return [ids for ids in self._text if ids[: len(token_ids)] == tuple(token_ids)]
