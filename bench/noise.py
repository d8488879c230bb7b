"""Noise instead of a model's work: fills a cache in seconds that prefill would fill in minutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import psutil

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import (
    Decoder,
    Engine,
    Float32,
    FramePattern,
    Int32,
    Int64,
    KVBuffer,
    KVPlace,
    KVType,
    LayerDecoder,
    StepResult,
    arrays_of,
)
from edgevlm.runtime.kv import DTYPES, KVScales, codes


def noise_scales(layers: int, kv_heads: int, head_dim: int) -> KVScales:
    """Scales that hold normal numbers."""
    return KVScales.holding(np.full((layers, kv_heads, head_dim // 2), 7.0), np.full((layers, kv_heads, head_dim), 6.0))


def as_stored(numbers: Float32, buffer: KVBuffer) -> np.ndarray:
    """Keys ``[kv_heads, n, head_dim]`` as a buffer stores them."""
    return numbers.astype(buffer.dtype) if buffer.key_scale is None else codes(numbers, buffer.key_scale)


def noise_buffers(layers: int, kv_heads: int, rows: int, head_dim: int, kv: KVType) -> list[KVBuffer]:
    """A KV buffer full of noise for each layer. Raises UserError where they do not fit into free memory."""
    shape, kind = (1, kv_heads, rows, head_dim), DTYPES[kv]
    wanted, free = 2 * layers * int(np.prod(shape)) * kind.itemsize, psutil.virtual_memory().available
    if wanted > free:
        raise UserError(f"{rows:,} rows take {wanted / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; lower --held")
    scales = noise_scales(layers, kv_heads, head_dim) if kv == "int8" else None
    random, made = np.random.default_rng(0), []
    for layer in range(layers):
        key, value = np.empty(shape, kind), np.empty(shape, kind)
        of_layer = (None, None) if scales is None else (scales.key[layer], scales.value[layer])
        buffer = KVBuffer(key.ctypes.data, value.ctypes.data, shape, kind, (key, value), *of_layer)
        for part in arrays_of(buffer):
            part[:] = as_stored(random.standard_normal(shape[1:], np.float32), buffer)
        made.append(buffer)
    return made


class NoiseEngine:
    """An engine whose features are noise, and whose decoders append noise, and no more, inside :meth:`filling`."""

    kv_place: KVPlace = "host"

    def __init__(self, engine: Engine, bundle: Bundle, seed: int = 0) -> None:
        self.bundle, self.is_filling = bundle, False
        self._engine, self._random = engine, np.random.default_rng(seed)

    def encode(self, pixels: Float32) -> Float32:
        """Features ``[G, tokens_per_frame, row_width]``, whatever the pixels."""
        vision = self.bundle.vision
        return self.normal(-(-len(pixels) // vision.group), vision.tokens_per_frame, self.bundle.decoder.row_width)

    def capacity(self, rows: int) -> int:
        return self._engine.capacity(rows)

    def embed(self, token_ids: Int64) -> Float32:
        return self._engine.embed(token_ids)

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), variant: str = "whole") -> NoiseDecoder:
        return NoiseDecoder(self, self._engine.bind(buffers, probes, variant), buffers, probes)

    def bind_layers(self, buffers: Sequence[KVBuffer]) -> NoiseLayers:
        return NoiseLayers(self, self._engine.bind_layers(buffers), buffers)

    def project(self, embeds: Float32, cos: Float32, sin: Float32) -> tuple[list[Float32], list[Float32]]:
        return self._engine.project(embeds, cos, sin)

    def release_memory(self, short: bool) -> None:
        self._engine.release_memory(short)

    @contextmanager
    def filling(self) -> Iterator[None]:
        self.is_filling = True
        try:
            yield
        finally:
            self.is_filling = False

    def close(self) -> None:
        self._engine.close()

    def normal(self, *shape: int) -> Float32:
        return self._random.standard_normal(shape, np.float32)


class NoiseDecoder:
    """A decoder of :class:`NoiseEngine`: keys, values and probed queries are normal numbers while it is filling."""

    def __init__(self, engine: NoiseEngine, decoder: Decoder, buffers: Sequence[KVBuffer], probes: Sequence[int]) -> None:
        self._engine, self._decoder, self._probes = engine, decoder, tuple(probes)
        self._buffers = tuple(buffers)  # keeps their owners alive
        self._memory = [arrays_of(buffer) for buffer in buffers]

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
    ) -> StepResult:
        if not self._engine.is_filling:
            return self._decoder.step(embeds, cos, sin, past_len, logit_rows, pattern)
        spec, rows, normal = self._engine.bundle.decoder, len(embeds), self._engine.normal
        for layer, buffer, held in zip(self._memory, self._buffers, past_len, strict=True):
            for part in layer:
                part[:, held : held + rows] = as_stored(normal(spec.kv_heads, rows, spec.head_dim), buffer)
        probes = {layer: normal(spec.heads, rows, spec.head_dim) for layer in self._probes}
        return StepResult(np.zeros((len(logit_rows), spec.vocab), np.float32), probes)


class NoiseLayers:
    """A decoder of :class:`NoiseEngine` in per-layer graphs: all it computes is normal numbers while it is filling."""

    def __init__(self, engine: NoiseEngine, decoder: LayerDecoder, buffers: Sequence[KVBuffer]) -> None:
        self._engine, self._decoder, self._spec = engine, decoder, engine.bundle.decoder
        self._buffers = tuple(buffers)  # keeps their owners alive
        self._memory = [arrays_of(buffer) for buffer in buffers]
        self._rows, self._logits = 0, 0

    def begin(self, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int] = (-1,)) -> Float32:
        if not self._engine.is_filling:
            return self._decoder.begin(embeds, cos, sin, logit_rows)
        self._rows, self._logits = len(embeds), len(logit_rows)
        return self._query()

    def attend(self, layer: int, past: Int32) -> Float32 | None:
        if not self._engine.is_filling:
            return self._decoder.attend(layer, past)
        for part in self._memory[layer]:
            new = as_stored(self._engine.normal(self._spec.kv_heads, self._rows, self._spec.head_dim), self._buffers[layer])
            for head, held in enumerate(past):
                part[head, held : held + self._rows] = new[head]
        return self._query() if layer + 1 < self._spec.layers else None

    def logits(self) -> Float32:
        return np.zeros((self._logits, self._spec.vocab), np.float32) if self._engine.is_filling else self._decoder.logits()

    def _query(self) -> Float32:
        return self._engine.normal(self._spec.heads, self._rows, self._spec.head_dim)
