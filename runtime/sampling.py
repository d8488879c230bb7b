"""Greedy and nucleus sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Sampler:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens whose probability reaches it; seed fixes the draw."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and 0 < self.top_p <= 1):
            raise ValueError("temperature must be 0 or more and finite, and top_p in (0, 1]")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed must be 0 or more, not {self.seed}")
        self._random = np.random.default_rng(self.seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """The next token id from logits ``[vocabulary]``."""
        if self.temperature == 0:
            return int(logits.argmax())
        below = logits.astype(np.float64) - logits.max()
        with np.errstate(over="ignore"):  # of a temperature next to 0: minus infinity
            probabilities = np.exp(below / self.temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        cumulative = np.cumsum(probabilities[order])
        nucleus = order[: int(np.searchsorted(cumulative, self.top_p)) + 1]
        weights = probabilities[nucleus]
        return int(self._random.choice(nucleus, p=weights / weights.sum()))
