"""Keys and values that are noise, in every KV precision, and caches filled with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.engine import Float32, KVBuffer, arrays_of
from edgevlm.runtime.kv import DTYPES, KVScales, KVType, codes

FRAMES = 31  # held at the default shape: 31 frames of 14 x 14 tokens
GROUP = 8  # query heads of each KV head, where a policy asks for queries


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


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A cache's sizes: ``tokens`` held in each layer and KV head, all of them vision."""

    layers: int = 36
    kv_heads: int = 2
    head_dim: int = 128
    tokens: int = 6076

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.tokens) < 1 or self.head_dim < 2 or self.head_dim % 2:
            raise UserError("--layers, --kv-heads and --tokens are 1 or more, and --head-dim is even")

    @property
    def side(self) -> int:
        """Patches along a frame."""
        return max(1, round((self.tokens / FRAMES) ** 0.5))


class FilledCache:
    """A cache that is filled with noise up to its budget, again and again."""

    kind: Callable[..., KVCache] = KVCache

    def __init__(self, shape: CacheShape, dtype: str) -> None:
        pairs = shape.head_dim // 2
        inv_freq = 1 / 1e6 ** (np.arange(pairs) / pairs)
        self.shape, self.next = shape, 0
        capacity = shape.tokens + 1  # one for a summary
        heads, scales = (shape.layers, shape.kv_heads, shape.head_dim), None
        if dtype == "int8":
            scales = noise_scales(*heads)
        self.cache = self.kind(*heads, capacity, inv_freq=inv_freq, dtype=dtype, scales=scales)
        self._random = np.random.default_rng(0)
        noise = self._random.standard_normal((shape.kv_heads, shape.tokens, shape.head_dim), np.float32)
        self._noise = as_stored(noise, self.cache.buffers()[0])

    def fill(self) -> Rows | None:
        """Append rows, the next of the stream, until the fullest layer is at the budget; None if it is."""
        count = self.shape.tokens - int(self.cache.lengths.max())
        if count <= 0:
            return None
        token, side = np.arange(self.next, self.next + count), self.shape.side
        patch = token % side**2
        rows = Rows(
            kind=np.full(count, Kind.VISION, np.uint8),
            seq=token.astype(np.int64),
            frame=(token // side**2).astype(np.int32),
            row=(patch // side).astype(np.int16),
            col=(patch % side).astype(np.int16),
            position=token[:, None].astype(np.int32),
        )
        self.cache.reserve(count)
        for buffer, held in zip(self.cache.buffers(), self.cache.lengths, strict=True):
            shifts = self._random.integers(self.shape.tokens, size=2)
            self.write(buffer, int(held), [np.roll(self._noise, int(shift), 1)[:, :count] for shift in shifts])
        self.cache.commit(rows)
        self.next += count
        return rows

    def write(self, buffer: KVBuffer, start: int, rows: Sequence[np.ndarray]) -> None:
        """Keys and values from row ``start`` on, each ``[kv_heads, n, head_dim]``."""
        for memory, new in zip(arrays_of(buffer), rows, strict=True):
            memory[:, start : start + new.shape[1]] = new

    def noise(self, heads: int, rows: int) -> np.ndarray:
        return self._random.standard_normal((heads, rows, self.shape.head_dim), np.float32)
