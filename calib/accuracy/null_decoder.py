"""What a policy takes at a budget, found with a decoder that computes nothing: bytes go by shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from edgevlm.calib.footprint import Footprint
from edgevlm.runtime.bundle import DecoderSpec
from edgevlm.runtime.engine import Engine, Float32, FramePattern, Int32, KVBuffer, KVPlace, StepResult
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.stream import Stream


class NullDecoder:
    """Appends rows as the arena has them; logits and queries are zeros."""

    def __init__(self, spec: DecoderSpec, probes: Sequence[int]) -> None:
        self._spec, self._probes = spec, probes

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
    ) -> StepResult:
        queries = np.zeros((self._spec.heads, len(embeds), self._spec.head_dim), np.float32)
        logits = np.zeros((len(logit_rows), self._spec.vocab), np.float32)
        return StepResult(logits, dict.fromkeys(self._probes, queries))


class NullEngine:
    """An engine but for its decoders."""

    kv_place: KVPlace = "host"

    def __init__(self, engine: Engine, spec: DecoderSpec) -> None:
        self._engine, self._spec = engine, spec

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), variant: str = "whole") -> NullDecoder:
        return NullDecoder(self._spec, probes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def peak_bytes(
    model: Model, policy: Policy, tokens: int, prefix: Sequence[int], text_rows: int, frames: int, chunk: int
) -> int:
    """The most bytes that cache and policy take together at |M| = ``tokens``, in a stream of ``frames`` frames.

    Raises UserError for a budget at which the policy cannot run.
    """
    spec, per_frame = model.bundle.decoder, model.bundle.vision.tokens_per_frame
    blank = replace(model, engine=cast(Engine, NullEngine(model.engine, spec)))
    stream = Stream(blank, policy, tokens, prefix, text_rows, "lazy", chunk)
    footprint = Footprint()
    footprint.measure(stream.cache, policy)
    for first in range(0, frames, chunk):
        stream.append_frames(np.zeros((min(chunk, frames - first), per_frame, spec.row_width), np.float32))
        footprint.measure(stream.cache, policy)
    return footprint.peak
