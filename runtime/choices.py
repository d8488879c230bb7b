"""Which policy does best on a model, budget by budget, with the numbers it was chosen by: ``choices.json`` of its bundle."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

FORMAT = 2
CHOICES = "choices.json"

Measure = Literal["streamqa", "kl"]
"""streamqa: share of the demo world's questions answered right. kl: mean KL(full KV || policy) of next tokens, in nats."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy at one budget.

    tokens: the |M| at which cache and policy take no more bytes than a plain window of the budget. value, ci_low, ci_high: by
    the measure, with its 95 % interval; top1: share of the next tokens that are full KV's (``kl`` alone). compress_ms: what the
    compressions of a stream took, on average. bytes: the most that cache and policy took together.
    """

    policy: str
    tokens: int
    value: float
    ci_low: float
    ci_high: float
    compress_ms: float
    bytes: int
    top1: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy chosen at a budget of |M| tokens, among candidates; skipped: policies that cannot run at it, and why.

    chosen: None where no candidate is clearly better than the policy that ``auto`` falls back to.
    """

    budget: int
    chosen: str | None
    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Candidate | None:
        """The candidate that was chosen."""
        return next((candidate for candidate in self.candidates if candidate.policy == self.chosen), None)


@dataclass(frozen=True, slots=True)
class Choices:
    """A choice a budget, budgets rising.

    watched: the clips, or the worlds' seed. frames: of the longest stream. known: the bounded policies there were, measured or
    not, so that newer ones can be told.
    """

    edgevlm: str
    date: str  # ISO 8601, UTC
    measure: Measure
    watched: tuple[str, ...]
    frames: int
    known: tuple[str, ...]
    budgets: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"policies chosen by {self.measure!r}, which is no measure")
        tokens = [choice.budget for choice in self.budgets]
        if not tokens or tokens[0] < 1 or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError("budgets of policies that do not rise")
        for choice in self.budgets:
            if choice.chosen is not None and choice.chosen not in [candidate.policy for candidate in choice.candidates]:
                raise ValueError(f"a policy {choice.chosen!r} chosen that was not measured")
            numbers = [x for c in choice.candidates for x in (c.value, c.ci_low, c.ci_high, c.compress_ms, c.bytes)]
            if not all(math.isfinite(x) for x in numbers):
                raise ValueError("a value that is not a number")

    def to_json(self) -> bytes:
        """The bytes of ``choices.json``."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Choices:
        """Read it again. Raises ValueError, which says what is wrong with it."""
        try:
            values = json.loads(raw)
            if values["format"] not in (1, FORMAT):
                raise ValueError(f"is of choices format {values['format']!r} and this edgevlm reads formats 1 to {FORMAT}")
            return cls._from_dict(values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"does not describe choices ({error!r})") from None

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> Choices:
        return cls(
            edgevlm=str(values["edgevlm"]),
            date=str(values["date"]),
            measure=values["measure"],
            watched=tuple(values["watched"]),
            frames=int(values["frames"]),
            known=tuple(values["known"]),
            budgets=tuple(
                Choice(
                    int(of["budget"]),
                    None if of["chosen"] is None else str(of["chosen"]),
                    tuple(Candidate(**candidate) for candidate in of["candidates"]),
                    tuple((str(policy), str(why)) for policy, why in of["skipped"]),
                )
                for of in values["budgets"]
            ),
        )

    def nearest(self, budget: int) -> Choice:
        """The choice at the measured budget nearest to ``budget`` by ratio, the smaller of two as near."""
        return min(self.budgets, key=lambda choice: abs(math.log(choice.budget / max(budget, 1))))
