"""Fetch rows from the store into free rows of the cache, so that a decoder with per-layer graphs can attend to them.

During a call that appends S rows, each layer and KV head also holds r fetched rows, the working set::

    [0, n)              valid rows of the cache: prefix, window, text
    [n, n + r)          the working set, in no particular order
    [n + r, n + r + S)  the new rows, written there by the engine

After the call, :meth:`WorkingSet.settle` moves the new rows to ``[n, n + S)``, and the cache commits them there. Until the
stream is first re-indexed, fetched rows keep the positions they were stored with. After that, fetched rows get consecutive
positions in temporal order, between the prefix and all other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.engine import arrays_of
from edgevlm.runtime.evidence import SeenRows
from edgevlm.runtime.kv import codes
from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block, Store, joined

Phase = Literal["prefill", "question", "answer"]
"""The rows of a call: frames, a question's text, or one token of an answer."""

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class WorkingSet(Stateful):
    """The rows fetched from the store, up to ``rows`` in each layer and KV head.

    ``held``: the number of rows in use, ``[layers, kv_heads]``. ``prefix``: the first position of fetched rows after
    re-indexing.
    """

    state_fields = ("contiguous",)

    def __init__(self, cache: KVCache, store: Store, rows: int, prefix: int) -> None:
        self._cache, self._store, self.rows, self._prefix = cache, store, rows, prefix
        self.contiguous = False
        self.held = np.zeros((cache.layers, cache.kv_heads), np.int32)
        self.truncated = 0  # the total number of chosen rows that did not fit in the set
        self._start = np.full(cache.layers, -1, np.int64)
        self._chosen: list[list[tuple[int, ...]]] = [[] for _ in range(cache.layers)]
        self._known: dict[tuple[int, int], tuple[NDArray[np.integer], ...]] = {}  # fetched rows' frame, row, col, confirmed
        self._turned = np.zeros((cache.layers, cache.kv_heads), np.int64)
        self._memory = [arrays_of(buffer) for buffer in cache.buffers()]  # keys, values [kv_heads, capacity, head_dim]

    def forget(self) -> None:
        """Make the next call fetch all rows again, because block numbers have changed."""
        self._start[:] = -1

    def load(
        self, layer: int, chosen: Sequence[Sequence[int]], always: Callable[[int], Sequence[Block]] | None = None
    ) -> Int32:
        """Fetch the blocks that each KV head has chosen, best first. Return the number of rows in each head, ``[kv_heads]``.

        ``always``: a function that, for a layer, returns rows to load before the chosen blocks, one block per KV head. Rows
        that do not fit are dropped.
        """
        wanted, start = [tuple(map(int, numbers)) for numbers in chosen], int(self._cache.lengths[layer])
        if self._start[layer] != start or self._chosen[layer] != wanted:
            numbers = sorted({number for of_head in wanted for number in of_head})
            found = dict(zip(numbers, self._store.get(numbers), strict=True))
            own = always(layer) if always else []
            for head, of_head in enumerate(wanted):
                blocks = [block.head(head) for number in of_head if (block := found[number]) is not None]
                blocks = [*own[head : head + 1], *blocks]
                self.held[layer, head] = self._place(layer, head, start, blocks)
            self._start[layer], self._chosen[layer] = start, wanted
        counts: Int32 = self.held[layer]
        return counts

    def settle(self, layer: int, appended: int) -> None:
        """Move the newly appended rows in front of each head's working set. ``appended``: the number of new rows."""
        start = int(self._start[layer])
        for head, held in enumerate(self.held[layer]):
            moved = min(int(held), appended)
            self._turned[layer, head] += moved
            for memory in self._memory[layer]:
                rows = memory[head]
                aside = rows[start : start + moved].copy()
                rows[start : start + appended] = rows[start + held : start + held + appended].copy()
                rows[start + appended + held - moved : start + appended + held] = aside
        self._start[layer] = start + appended

    def seen(self, layer: int, head: int) -> SeenRows:
        """Return a KV head's fetched rows, which a question attended to in addition to the cache."""
        start, held = int(self._start[layer]), int(self.held[layer, head])
        key = self._memory[layer][0][head : head + 1, start : start + held]
        known = self._known[layer, head] if held else (np.zeros(0, np.int32),) * 4
        scale = head_of(self._cache.key_scale(layer), head)
        return SeenRows(dequantize(key, scale)[0], *(np.roll(part, -self._turned[layer, head]) for part in known))

    def _place(self, layer: int, head: int, start: int, blocks: list[Block]) -> int:
        every = joined(blocks) if blocks else None
        if every is None or not (rows := every[: self.rows]):
            return 0
        self.truncated += len(every) - len(rows)
        self._turned[layer, head] = 0
        self._known[layer, head] = rows.frame[0], rows.row[0], rows.col[0], rows.confirmed[0]
        end, (key, value) = start + len(rows), self._memory[layer]
        key[head, start:end] = self._rotated(layer, head, rows) if self.contiguous else rows.key[0]
        value[head, start:end] = rows.value[0]
        return len(rows)

    def _rotated(self, layer: int, head: int, rows: Block) -> NDArray[np.number]:
        cache, scale = self._cache, head_of(self._cache.key_scale(layer), head)
        by = contiguous(rows, self._prefix) - rows.position[0]
        key = rotate(dequantize(rows.key, scale)[0], by, cache.inv_freq, cache.pair_axis)
        return key.astype(cache.dtype) if scale is None else codes(key[None], scale)[0]


def contiguous(rows: Block, first: int) -> Int32:
    """Return consecutive positions for the rows of one head, in temporal order, int32 ``[n, axes]``.

    ``first``: the first position. With one axis, a position is the row's rank by ``seq``. With three axes (M-RoPE), a position
    is the rank of the frame, and the row and column of the patch.
    """
    axes = rows.position.shape[2]
    if axes == 1:
        rank = np.empty(len(rows), np.int32)
        rank[np.argsort(rows.seq[0], kind="stable")] = np.arange(len(rows), dtype=np.int32)
        return (first + rank)[:, None]
    frame = np.unique(rows.frame[0], return_inverse=True)[1]
    return (first + np.stack([frame, rows.row[0], rows.col[0]], 1)).astype(np.int32)


def rotate(key: Float32, by: Int32 | Float32, inv_freq: NDArray[np.float64], pair_axis: NDArray[np.uint8] | None) -> Float32:
    """Rotate keys by a number of positions. A rotary pair is ``(d, d + head_dim / 2)``.

    ``key``: ``[.., n, head_dim]``. ``by``: how many positions to rotate each key by, ``[.., n, axes]``.
    """
    angles = (by[..., :1] if pair_axis is None or by.shape[-1] == 1 else by[..., pair_axis]) * inv_freq
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = np.split(key, 2, -1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def dequantize(rows: NDArray[np.number], scale: Float32 | None) -> Float32:
    """Convert stored keys or values to float32. ``rows``: ``[H, n, head_dim]``. ``scale``: ``[H, head_dim]``, for int8."""
    numbers = rows.astype(np.float32)
    return numbers if scale is None else numbers * scale[:, None]


def head_of(scale: Float32 | None, head: int) -> Float32 | None:
    """Return the scale of one KV head, ``[1, head_dim]``."""
    return None if scale is None else scale[head : head + 1]


def unrotated_keys(cache: KVCache, layer: int, block: Block, head: int | None = None) -> Float32:
    """Return a block's un-rotated keys, float32 ``[H, n, head_dim]``. ``head``: the KV head of a block with one head."""
    scale = cache.key_scale(layer)
    key = dequantize(block.key, scale if head is None else head_of(scale, head))
    return rotate(key, -block.position, cache.inv_freq, cache.pair_axis)
