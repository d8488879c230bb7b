"""Measure the bytes of a cache and its policy, and find the budget at which they take no more bytes than a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle, DecoderSpec
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.engine import Engine, Fetch, Float32, FramePattern, Int32, KVBuffer, KVDevice, Sight, StepResult
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.stateful import bytes_of
from edgevlm.runtime.stream import Stream


class PeakBytes:
    """The most bytes that the cache and the policy's state took together so far."""

    def __init__(self) -> None:
        self.bytes = 0

    def measure(self, cache: KVCache, policy: Policy, present: int = 0) -> None:
        """Count the bytes of the cache and the policy now. ``present``: bytes of frames kept outside the cache."""
        self.bytes = max(self.bytes, cache.nbytes + bytes_of(policy) + present)


def bytes_per_token(bundle: Bundle) -> int:
    """Return by how many bytes a cache grows with one more token in every layer, on average."""
    spec = bundle.decoder
    shape, inv_freq = (spec.layers, spec.kv_heads, spec.head_dim), np.array(spec.inv_freq)
    few, many = (KVCache.bytes_for(*shape, rows, inv_freq=inv_freq, dtype=spec.kv) for rows in (1024, 2048))
    return (many - few) // 1024


def equal_byte_budget(tokens: int, allowed: int, per_token: int, least: int, peak_bytes: Callable[[int], int]) -> int:
    """Return the largest budget up to ``tokens`` at which a policy takes at most ``allowed`` bytes.

    ``per_token``: the bytes that one token takes in all layers together. ``least``: the smallest budget, which is the number of
    tokens in a frame. ``peak_bytes``: a function that returns the bytes that the policy takes at a budget; these must grow with
    the budget. Raises UserError if ``allowed`` bytes are too few for one frame.
    """
    low, over = tokens, peak_bytes(tokens) - allowed
    high, beyond = tokens + 1, max(over, 1)
    while over > 0:
        high, beyond = low, over
        low -= -(-over // per_token)
        if low < least:
            left = f"equal bytes leave {max(low, 0)} tokens"
            raise UserError(f"{left}, less than one frame ({least})")
        over = peak_bytes(low) - allowed
    while high - low > 1:
        middle = low + (high - low) * -over // (beyond - over)  # linear interpolation
        middle = min(max(middle, low + 1), high - 1)
        excess = peak_bytes(middle) - allowed
        if excess > 0:
            high, beyond = middle, excess
        else:
            low, over = middle, excess
    return low


class WrappedEngine:
    """An engine that forwards every call to another engine. Subclasses override only the methods that they change."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class NullEngine(WrappedEngine):
    """An engine that computes nothing and returns zeros."""

    kv_device: KVDevice = "host"
    by_layer = True

    def __init__(self, engine: Engine, spec: DecoderSpec) -> None:
        super().__init__(engine)
        self._spec, self._probes = spec, tuple[int, ...]()

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> NullEngine:
        self._probes = tuple(probes)
        return self

    def step(
        self, embeds: Float32, cos: Float32, sin: Float32, past_len: Int32, logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None, rows: Sequence[Sequence[Int32]] | None = None, fetch: Fetch | None = None,
        sight: Sight | None = None,
    ) -> StepResult:  # fmt: skip
        queries = np.zeros((self._spec.heads, len(embeds), self._spec.head_dim), np.float32)
        if fetch is not None:
            for layer in range(self._spec.layers):
                fetch(layer, queries)
        return StepResult(np.zeros((len(logit_rows), self._spec.vocab), np.float32), dict.fromkeys(self._probes, queries))


def peak_bytes(
    model: Model, policy: Policy, tokens: int, prefix: Sequence[int], text_rows: int, frames: int, chunk: int
) -> int:
    """Return the most bytes that the cache and the policy take together in a stream, with a budget of ``tokens``.

    Raises UserError if the policy cannot run at this budget.
    """
    spec, per_frame = model.bundle.decoder, model.bundle.vision.tokens_per_frame
    null = replace(model, engine=cast(Engine, NullEngine(model.engine, spec)))
    stream = Stream(null, policy, tokens, prefix, text_rows, "lazy", chunk)
    peak = PeakBytes()
    peak.measure(stream.cache, policy)
    for first in range(0, frames, chunk):
        stream.append_frames(np.zeros((min(chunk, frames - first), per_frame, spec.row_width), np.float32))
        peak.measure(stream.cache, policy)
    return peak.bytes
