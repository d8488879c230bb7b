"""Make random keys and values in every KV precision, and caches filled with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.engine import Float32, KVBuffer, arrays_of
from edgevlm.runtime.kv import KVScales, codes

FRAMES = 31  # the default shape holds 31 frames of 14 x 14 patches,
GROUP = 8  # with 8 query heads per KV head


def as_stored(numbers: Float32, buffer: KVBuffer) -> np.ndarray:
    """Convert keys ``[kv_heads, n, head_dim]`` to the number format of a buffer."""
    return numbers.astype(buffer.dtype) if buffer.key_scale is None else codes(numbers, buffer.key_scale)


def empty_cache(layers: int, kv_heads: int, head_dim: int, rows: int, dtype: str, kind: type[KVCache] = KVCache) -> KVCache:
    """Return an empty cache with room for ``rows`` rows per layer. An int8 cache's scales fit normally distributed numbers."""
    pairs, scales = head_dim // 2, None
    if dtype == "int8":
        scales = KVScales.holding(np.full((layers, kv_heads, pairs), 7.0), np.full((layers, kv_heads, head_dim), 6.0))
    return kind(layers, kv_heads, head_dim, rows, inv_freq=1 / 1e6 ** (np.arange(pairs) / pairs), dtype=dtype, scales=scales)


def noise_cache(layers: int, kv_heads: int, head_dim: int, rows: int, dtype: str) -> KVCache:
    """Return an empty cache whose buffers are filled with random numbers."""
    cache, random = empty_cache(layers, kv_heads, head_dim, rows, dtype), np.random.default_rng(0)
    for buffer in cache.buffers():
        for part in arrays_of(buffer):
            part[:] = as_stored(random.standard_normal(part.shape, np.float32), buffer)
    return cache


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of a cache. ``tokens``: vision tokens in each layer and KV head."""

    layers: int = 36
    kv_heads: int = 2
    head_dim: int = 128
    tokens: int = 6076

    @property
    def side(self) -> int:
        return max(1, round((self.tokens / FRAMES) ** 0.5))


class FilledCache:
    """A cache that can be filled with random keys and values again and again."""

    kind: type[KVCache] = KVCache

    def __init__(self, shape: CacheShape, dtype: str) -> None:
        self.shape, self.next = shape, 0
        sizes = shape.layers, shape.kv_heads, shape.head_dim, shape.tokens + 1  # one row beyond the budget, for a summary token
        self.cache = empty_cache(*sizes, dtype, self.kind)
        self._random = np.random.default_rng(0)
        self._noise = as_stored(self.noise(shape.kv_heads, shape.tokens), self.cache.buffers()[0])

    def fill(self) -> Rows | None:
        """Append rows until a layer is full, and return them. If a layer was already full, return None."""
        count = self.shape.tokens - int(self.cache.lengths.max())
        if count <= 0:
            return None
        token, side = np.arange(self.next, self.next + count), self.shape.side
        row, col = (part.astype(np.int16) for part in np.divmod(token % side**2, side))
        kind, frame = np.full(count, Kind.VISION, np.uint8), (token // side**2).astype(np.int32)
        rows = Rows(kind, token.astype(np.int64), frame, row, col, token[:, None].astype(np.int32))
        self.cache.reserve(count)
        for buffer, held in zip(self.cache.buffers(), self.cache.lengths, strict=True):
            shifts = self._random.integers(self.shape.tokens, size=2)
            self.write(buffer, int(held), [np.roll(self._noise, int(shift), 1)[:, :count] for shift in shifts])
        self.cache.commit(rows)
        self.next += count
        return rows

    def write(self, buffer: KVBuffer, start: int, rows: Sequence[np.ndarray]) -> None:
        """Write keys and values, each ``[kv_heads, n, head_dim]``, from row ``start`` on."""
        for memory, new in zip(arrays_of(buffer), rows, strict=True):
            memory[:, start : start + new.shape[1]] = new

    def noise(self, heads: int, rows: int) -> np.ndarray:
        return self._random.standard_normal((heads, rows, self.shape.head_dim), np.float32)
