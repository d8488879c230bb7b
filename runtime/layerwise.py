"""A decoder driven layer by layer: between projection and attention of each the policy says what is attended to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from edgevlm.runtime.engine import Float32, FramePattern, Int32, LayerDecoder, StepResult
from edgevlm.runtime.policies.retrieval import Phase, Retrieval


class LayerByLayer:
    """A :class:`~edgevlm.runtime.engine.Decoder` made of a cut one and a retrieval policy.

    ``phase``: of the rows that come next. ``probes``: layers whose queries a step returns.
    """

    def __init__(self, cut: LayerDecoder, policy: Retrieval, probes: Sequence[int] = ()) -> None:
        self._cut, self._policy, self._probes = cut, policy, frozenset(probes)
        self.phase: Phase = "prefill"

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
    ) -> StepResult:
        """As the protocol says; the rows appended are causal among themselves and see the working set before them."""
        policy, compute_ms, probes = self._policy, self._policy.stats.compute_ms, {}
        started = time.perf_counter()
        policy.begin(cos, sin)
        query: Float32 | None = self._cut.begin(embeds, cos, sin, logit_rows)
        compute_ms[self.phase] += 1e3 * (time.perf_counter() - started)
        for layer, past in enumerate(past_len):
            assert query is not None  # but for the last layer's, there is a next
            if layer in self._probes:
                probes[layer] = query.copy()
            fetched = policy.attend(layer, query, self.phase)
            started = time.perf_counter()
            query = self._cut.attend(layer, (past + fetched).astype(np.int32))
            policy.working.settle(layer, len(embeds))
            compute_ms[self.phase] += 1e3 * (time.perf_counter() - started)
        return StepResult(self._cut.logits(), probes)
