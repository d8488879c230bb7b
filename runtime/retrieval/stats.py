"""What retrieval has done, counted by phase, layer and KV head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Phase = Literal["prefill", "question", "answer"]
"""What the rows of a call are: frames, a question's text, or one token of an answer."""

PHASES: tuple[Phase, ...] = get_args(Phase)


class RetrievalStats:
    """``fetched`` of ``held`` rows, int64 ``[phases, layers, kv_heads]``, summed over calls; times in milliseconds by phase.

    predict_ms: choosing, of the next layer's too. fetch_ms: from the store into the arena. compute_ms: the graphs. calls: of
    layer 0. cut: rows chosen that the working set had no room for.
    """

    def __init__(self, layers: int, kv_heads: int) -> None:
        self.fetched = np.zeros((len(PHASES), layers, kv_heads), np.int64)
        self.held = np.zeros_like(self.fetched)
        self.predict_ms, self.fetch_ms, self.compute_ms = (dict.fromkeys(PHASES, 0.0) for _ in range(3))
        self.calls = dict.fromkeys(PHASES, 0)
        self.cut = 0

    def count(self, phase: Phase, layer: int, fetched: NDArray[np.int32], held: NDArray[np.int64]) -> None:
        """One call of one layer: rows fetched of those held, ``[kv_heads]`` each."""
        at = PHASES.index(phase)
        self.fetched[at, layer] += fetched
        self.held[at, layer] += held
        self.calls[phase] += layer == 0

    def ratio(self, phase: Phase) -> NDArray[np.float64]:
        """The share of what is held below that was fetched, ``[layers, kv_heads]``; NaN where nothing was held."""
        at = PHASES.index(phase)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.fetched[at] / self.held[at]

    def shares(self, phase: Phase) -> Mapping[str, float]:
        """What prediction, fetching and computing took, as shares of their sum (V-Rex, Fig. 16); empty before a call."""
        parts = {"predict": self.predict_ms[phase], "fetch": self.fetch_ms[phase], "compute": self.compute_ms[phase]}
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()} if total else {}
