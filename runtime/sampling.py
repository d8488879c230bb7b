"""Draw an answer's tokens greedily, at a temperature, or so that they form one of several texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.evidence import QuestionAttention
from edgevlm.runtime.model import Model

MAX_CHOICES = 256


@dataclass
class Sampler:
    """Draws tokens. ``temperature``: 0 picks the likeliest token. ``top_p``: keep the smallest set of likeliest tokens that
    reaches this probability.

    ``top_k``: keep the k likeliest tokens; 0 keeps all. ``min_p``: keep tokens with at least this fraction of the highest
    probability. ``seed``: makes the draws repeatable. Raises UserError for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (self.top_k >= 0 and 0 <= self.min_p <= 1):
            raise UserError("top_k must be 0 or more, and min_p in [0, 1]")
        if not (0 <= self.temperature < float("inf") and 0 < self.top_p <= 1):
            raise UserError("temperature must be 0 or more and finite, and top_p in (0, 1]")
        if self.seed is not None and self.seed < 0:
            raise UserError(f"seed must be 0 or more, not {self.seed}")
        self._random = np.random.default_rng(self.seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Draw the next token id from logits ``[vocabulary]``."""
        if self.temperature == 0:
            return int(logits.argmax())
        below = logits.astype(np.float64) - logits.max()
        with np.errstate(over="ignore"):  # at a temperature near 0, ``below / temperature`` overflows to minus infinity
            probabilities = np.exp(below / self.temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")[: self.top_k or None]
        order = order[probabilities[order] >= self.min_p * probabilities[order[0]]]
        cumulative = np.cumsum(probabilities[order])
        nucleus = order[: int(np.searchsorted(cumulative, self.top_p)) + 1]
        weights = probabilities[nucleus]
        return int(self._random.choice(nucleus, p=weights / weights.sum()))


class Repetition:
    """A logits processor that penalises tokens of the prompt and the answer.

    ``penalty``: divides the positive logits of tokens used so far and multiplies their negative logits, as in transformers'
    ``generate``. ``ngram``: no sequence of this many tokens may repeat; 0 means no limit. As in OpenAI's API, ``presence`` is
    subtracted once from the logit of each token in the answer, and ``frequency`` once per occurrence. ``prompt``: the prompt's
    token ids. Raises UserError for a penalty out of range.
    """

    def __init__(self, penalty: float = 1.0, ngram: int = 0, presence: float = 0.0, frequency: float = 0.0) -> None:
        if not 0 < penalty < float("inf"):
            raise UserError("repetition_penalty must be more than 0 and finite")
        if not (-2 <= presence <= 2 and -2 <= frequency <= 2):
            raise UserError("presence_penalty and frequency_penalty must be in [-2, 2]")
        self.penalty, self.ngram, self.presence, self.frequency = penalty, ngram, presence, frequency
        self.prompt: list[int] = []

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the penalised logits of the answer's next token, ``[vocabulary]``. ``token_ids``: the answer so far."""
        if self.penalty == 1 and not (self.ngram or self.presence or self.frequency):
            return logits
        ids, changed = [*self.prompt, *token_ids], logits.copy()
        if self.penalty != 1:
            held = np.unique([token for token in ids if token >= 0])
            scores, penalty = logits[held], np.float32(self.penalty)
            changed[held] = np.where(scores < 0, scores * penalty, scores / penalty)
        if token_ids and (self.presence or self.frequency):
            said, count = np.unique(token_ids, return_counts=True)
            changed[said] -= (self.presence + self.frequency * count).astype(np.float32)
        if self.ngram and len(ids) >= self.ngram:
            last = ids[len(ids) - self.ngram + 1 :]
            runs = (ids[start : start + self.ngram] for start in range(len(ids) - self.ngram + 1))
            changed[[run[-1] for run in runs if run[:-1] == last]] = -np.inf
        return changed


class LogProb(NamedTuple):
    """A drawn token's log-probability before penalties and temperature, and the likeliest tokens at its position."""

    token: int
    value: float
    likeliest: list[tuple[int, float]]

    @classmethod
    def of(cls, logits: NDArray[np.float32], token: int, count: int) -> LogProb:
        """Return a token's log-probability. ``logits``: float32 ``[vocabulary]``. ``count``: how many likely tokens to list."""
        best = float(logits.max())
        total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
        order = np.argsort(-logits, kind="stable")[:count] if count else ()
        return cls(token, float(logits[token]) - total, [(int(each), float(logits[each]) - total) for each in order])


class Classified(NamedTuple):
    """The probability of each choice as the answer to a question, and the question's attention to the frames.

    ``time_s``: the stream's time at the newest frame that the question saw.
    """

    time_s: float
    probabilities: dict[str, float]
    looked: QuestionAttention


class OneOf:
    """A logits processor that allows only the tokens of ``texts``; a space may precede each text.

    ``probabilities``: the probability of each text; all texts' probabilities add up to 1. If several texts start with the same
    token, they share its probability evenly until a later token tells them apart.
    """

    def __init__(self, model: Model, texts: Sequence[str]) -> None:
        """Encode the texts. Raises UserError unless there are 2 to MAX_CHOICES texts, each with different tokens."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError("choices must be a list of texts")
        if not 2 <= len(texts) <= MAX_CHOICES:
            raise UserError(f"give 2 to {MAX_CHOICES} choices, not {len(texts)}")
        self.probabilities = dict.fromkeys(texts, 0.0)
        unknown = getattr(model.tokenizer.model, "unk_token", None)
        unknown_id = None if unknown is None else model.tokenizer.token_to_id(unknown)
        self._text: dict[tuple[int, ...], str] = {}  # maps each text's tokens to the text
        for text in texts:
            for written in (model.encode(text), model.encode(f" {text}")):
                if not text.strip() or unknown_id in written or model.bundle.chat.placeholder_id in written:
                    raise UserError(f"choice {text!r}: the tokenizer does not support it")
                if self._text.setdefault(tuple(written), text) != text:
                    raise UserError(f"choices {text!r} and {self._text[tuple(written)]!r} have the same tokens")
        if len(self.probabilities) < len(texts):
            raise UserError("duplicate choice")
        self.max_tokens = max(map(len, self._text))
        self._stop = model.bundle.chat.stop_ids[0]
        self._mass = dict.fromkeys(self._text, 1 / len(self._text))

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Set the logits of tokens that continue no choice to minus infinity. Also updates ``probabilities``.

        ``token_ids``: the answer so far. ``logits``: ``[vocabulary]``.
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
        """Return the probability of each text, given only the first token's logits, ``[vocabulary]``."""
        first = copy(self)
        first([], logits)
        return first.probabilities

    def check_first_tokens(self) -> None:
        """Raise UserError for texts that start with the same token."""
        begins: dict[int, str] = {}
        for ids, text in self._text.items():
            if (other := begins.setdefault(ids[0], text)) != text:
                raise UserError(f"choices {other!r} and {text!r} start with the same token; word one of them differently")

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the answer so far is a choice, and no other choice starts with it."""
        return self._open(token_ids) == [tuple(token_ids)]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the choice that the answer spells, or an empty string if it spells none yet."""
        return self._text.get(tuple(token_ids), "")

    def _open(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens of the choices that are still possible after the answer so far."""
        return [ids for ids in self._text if ids[: len(token_ids)] == tuple(token_ids)]
