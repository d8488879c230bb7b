"""Counts of retrieval by phase, layer and KV head."""

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

    window: rows attended to beside those. chosen, among: of the policy's rule, before truncation, and all that it chooses from;
    0 if a policy does not count them. predict_ms: choosing. fetch_ms: from the store into the arena. compute_ms: the graphs.
    offload_ms: into the store. calls: of layer 0. truncated: chosen rows without room. merged: joins because the index was
    full. lost: offloaded rows that are gone.
    """

    def __init__(self, layers: int, kv_heads: int) -> None:
        self.fetched = np.zeros((len(PHASES), layers, kv_heads), np.int64)
        self.held, self.window, self.chosen, self.among = (np.zeros_like(self.fetched) for _ in range(4))
        self.predict_ms, self.fetch_ms, self.compute_ms = (dict.fromkeys(PHASES, 0.0) for _ in range(3))
        self.calls = dict.fromkeys(PHASES, 0)
        self.offload_ms = 0.0
        self.truncated = self.merged = self.lost = 0

    def count(self, phase: Phase, layer: int, fetched: NDArray[np.int32], held: NDArray[np.int64], window: int = 0) -> None:
        """Count one call of one layer: rows fetched of those held, ``[kv_heads]`` each, beside ``window`` rows."""
        at = PHASES.index(phase)
        self.fetched[at, layer] += fetched
        self.held[at, layer] += held
        self.window[at, layer] += window
        self.calls[phase] += layer == 0

    def count_chosen(self, phase: Phase, layer: int, chosen: NDArray[np.int64], among: NDArray[np.int64]) -> None:
        """Count the rows that the policy's rule chose in one call of one layer, ``[kv_heads]`` each."""
        self.chosen[PHASES.index(phase), layer] += chosen
        self.among[PHASES.index(phase), layer] += among

    def ratio(self, phase: Phase) -> NDArray[np.float64]:
        """The fraction of the offloaded rows that was fetched, ``[layers, kv_heads]``; NaN where nothing was held."""
        at = PHASES.index(phase)
        return _fraction(self.fetched[at], self.held[at])

    def attended(self, phase: Phase) -> NDArray[np.float64]:
        """The fraction of all rows, window and offloaded, that was attended to, ``[layers, kv_heads]``."""
        at = PHASES.index(phase)
        return _fraction(self.fetched[at] + self.window[at], self.held[at] + self.window[at])

    def by_rule(self, phase: Phase) -> NDArray[np.float64]:
        """``chosen`` of ``among``, ``[layers, kv_heads]``; NaN if a policy does not count them."""
        at = PHASES.index(phase)
        return _fraction(self.chosen[at], self.among[at])

    def breakdown(self, phase: Phase) -> Mapping[str, float]:
        """Prediction, fetching and computing as fractions of their sum (V-Rex, Fig. 16); empty before a call."""
        parts = {"predict": self.predict_ms[phase], "fetch": self.fetch_ms[phase], "compute": self.compute_ms[phase]}
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()} if total else {}


def _fraction(part: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return part / total
