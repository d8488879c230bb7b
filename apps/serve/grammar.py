"""Answers that follow a JSON schema or a regular expression."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.model import Model

MAX_GRAMMAR = 65_536  # characters of a schema or an expression
ANY_OBJECT = {"type": "object"}

_tokenizers: WeakKeyDictionary[Model, LLTokenizer] = WeakKeyDictionary()  # take a second to make
_lock = threading.Lock()


class Grammar:
    """A logits processor of one answer: leaves the tokens that a text of the grammar can go on with."""

    def __init__(self, model: Model, grammar: str) -> None:
        """grammar: llguidance's. Raises UserError for an invalid one, and for a tokenizer that cannot write it."""
        self._matcher = LLMatcher(_tokenizer(model), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        self._taken = 0
        self._check()

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits ``[vocabulary]`` of the token after ``token_ids``: minus infinity for those that break the grammar."""
        self._matcher.consume_tokens(list(token_ids[self._taken :]))
        self._taken = len(token_ids)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        allowed = np.flatnonzero(bits[: len(logits)])
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def _check(self) -> None:
        if problem := self._matcher.get_error():
            raise UserError(f"the answer cannot follow this: {problem.splitlines()[0][:200]}")


def json_schema(model: Model, schema: Any) -> Grammar:
    """An answer that is JSON of ``schema``, itself an object or JSON text, without whitespace. Raises UserError."""
    try:
        text = _short(schema if isinstance(schema, str) else json.dumps(schema))
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    except ValueError as error:
        raise UserError(f"this is no JSON schema: {str(error).splitlines()[0][:200]}") from None
    return Grammar(model, grammar)


def regex(model: Model, pattern: str) -> Grammar:
    """An answer that matches ``pattern`` as a whole. Raises UserError."""
    return Grammar(model, LLMatcher.grammar_from_regex(_short(pattern)))


def _short(text: str) -> str:
    if len(text) > MAX_GRAMMAR:
        raise UserError(f"an answer's schema or expression has {MAX_GRAMMAR:,} characters at most, not {len(text):,}")
    return text


def _tokenizer(model: Model) -> LLTokenizer:
    with _lock:
        if model not in _tokenizers:
            try:
                _tokenizers[model] = LLTokenizer(model.tokenizer.to_str(), eos_token=model.bundle.chat.stop_ids[0])
            except ValueError:
                raise UserError("this model's tokenizer has whole words alone and cannot write JSON; give choices") from None
        return _tokenizers[model]
