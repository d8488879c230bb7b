"""Restrict answers to a JSON schema."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.model import Model

MAX_GRAMMAR = 65_536
MAX_MULTIPLE = 10_000  # a multipleOf of N takes N lexer states, which LIMITS does not count
MAX_BRANCHING = 4_000_000
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=100_000, step_max_items=3_000, max_lexer_states=25_000,
    max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip
SPENT_S, SHARE = 0.2, 0.2
_tokenizers: WeakKeyDictionary[Model, LLTokenizer] = WeakKeyDictionary()
_writers: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()  # whether each model can write JSON
_lock = threading.Lock()


def writes_json(model: Model) -> bool:
    """Return whether the model's tokens can spell JSON. The demo model's tokens are words, which cannot spell JSON."""
    if model not in _writers:
        try:
            _writers[model] = bool(Grammar(model, {"type": "object"}))
        except UserError:
            _writers[model] = False
    return _writers[model]


class Grammar:
    """A logits processor that makes one answer follow a JSON schema, without optional whitespace."""

    def __init__(self, model: Model, schema: Any) -> None:
        """Compile the schema. Raises UserError if the schema is invalid or too large, or if the tokenizer cannot write JSON."""
        try:
            if len(text := json.dumps(schema)) > MAX_GRAMMAR:
                raise ValueError(f"{len(text):,} characters exceed the limit of {MAX_GRAMMAR:,}")
            if math.lcm(*_multiples(schema)) > MAX_MULTIPLE:
                raise ValueError(f"without decimal points, its multipleOf values have a common multiple above {MAX_MULTIPLE:,}")
            if (number := sum(branches := [0, *_branches(schema)])) ** 2 * max(branches) > MAX_BRANCHING:
                raise ValueError(f"too many alternatives in anyOf and oneOf with $ref: {number:,}")
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
            with _lock:
                if model not in _tokenizers:
                    _tokenizers[model] = LLTokenizer(model.tokenizer.to_str(), eos_token=model.bundle.chat.stop_ids[0])
        except (ValueError, OverflowError, RecursionError) as error:
            why = str(error).splitlines()[0][:200]
            raise UserError(f"this model cannot follow this JSON schema ({why}); use choices or another schema") from None
        self._matcher = LLMatcher(_tokenizers[model], grammar, log_level=0, limits=LIMITS)
        self._taken, self._spent_s, self._began = 0, 0.0, 0.0
        self._check()
        self._allowed = self._compute()  # the first mask takes longest; compute it outside the model's thread

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the next token's logits ``[vocabulary]``, with minus infinity for tokens that break the grammar. Raises
        UserError if the grammar takes more than SPENT_S seconds plus the fraction SHARE of the answer's time."""
        if token_ids:
            before, now = time.thread_time(), time.monotonic()
            self._began = self._began or now
            self._matcher.consume_tokens(list(token_ids[self._taken :]))
            self._taken, self._allowed = len(token_ids), self._compute()
            self._spent_s += time.thread_time() - before
            if self._spent_s > SPENT_S + SHARE * (now - self._began):
                raise UserError("the answer cannot follow this schema: its tokens take too long; use a simpler schema")
        allowed = self._allowed[self._allowed < len(logits)]
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def _compute(self) -> NDArray[np.intp]:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        return np.flatnonzero(bits)

    def _check(self) -> None:
        if problem := self._matcher.get_error():
            raise UserError(f"the answer cannot follow this schema: {problem.splitlines()[0][:200]}")


def _multiples(schema: Any) -> Iterator[int]:
    """Yield the significant digits of each ``multipleOf`` as an integer: 25 for both 0.25 and 2500."""
    for part in _parts(schema):
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and multiple is not True and math.isfinite(multiple) and multiple:
            yield int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)))


def _branches(schema: Any) -> Iterator[int]:
    """Yield the number of alternatives of each ``anyOf`` or ``oneOf`` that contains a (possibly recursive) reference."""
    for part in _parts(schema):
        for among in (part.get("anyOf"), part.get("oneOf")):
            if isinstance(among, list) and any("$ref" in each for each in _parts(among)):
                yield len(among)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
