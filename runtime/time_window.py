"""Questions about a window of time: their rows attend to the memory's rows of that time alone.

A row's time reaches from its frame to the last one that confirmed it. The prefix is always seen; text is seen with its frames;
summaries, which belong to no time, never.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheFull, UserError
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.engine import Int32, arrays_of
from edgevlm.runtime.evidence import FrameTimes, SeenRows

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From ``since`` to ``until``, seconds of the stream, both included."""

    since: float = -math.inf
    until: float = math.inf

    def frames(self, times: FrameTimes, now: float) -> tuple[int, int]:
        """The first and the last frame of the window; the first is after the last where there is none.

        now: the stream's time. Until then the newest frame is what there was to be seen.
        """
        first, last = times.first_from(self.since), times.first_from(math.nextafter(self.until, math.inf)) - 1
        if last == times.newest:
            first = min(first, last) if self.since <= now else first
        return first, last


class NothingHeld(UserError):
    """The memory holds no row of a window. ``oldest_s``: the time of its oldest row, None where it has none."""

    def __init__(self, window: TimeWindow, oldest_s: float | None) -> None:
        since = "the beginning" if window.since == -math.inf else f"{window.since:.1f} s"
        until = "now" if window.until == math.inf else f"{window.until:.1f} s"
        reaches = "it is empty" if oldest_s is None else f"it reaches back to {oldest_s:.1f} s"
        super().__init__(f"the memory holds nothing from {since} to {until} of the stream; {reaches}")
        self.window, self.oldest_s = window, oldest_s


def rows_of(cache: KVCache, layer: int, first: int, last: int, newest: int) -> Bool:
    """Rows of a layer that a question about frames ``first`` to ``last`` attends to, ``[kv_heads, n]``.

    Frames after ``newest`` are pictures that it shows.
    """
    kind, frame = cache.kind(layer), cache.frame(layer)
    shown = (frame > newest) | ((frame <= last) & (cache.confirmed(layer) >= first))
    seen: Bool = (kind == Kind.VISION) & shown
    around = (frame < 0) | np.isin(frame, frame[seen])
    return seen | (kind == Kind.PREFIX) | ((kind == Kind.TEXT) & around)


class NarrowedMemory:
    """A cache of which, until :meth:`restore`, a decoder attends to some rows alone.

    They are moved to the front of each KV head's keys and values, and the call's rows follow them; the rows that are written
    over are kept beside, a copy of at most half the cache and of the rows appended. What the cache knows of its rows stays as
    it is, and the cache must not be used meanwhile.
    """

    def __init__(self, cache: KVCache, shown: Sequence[Bool], frames: tuple[int, int]) -> None:
        """shown: ``[kv_heads, n_l]`` of each layer. frames: the first and last of the window, for :meth:`seen`."""
        self._cache, self._frames = cache, frames
        self._lengths = np.stack([mask.sum(1, dtype=np.int32) for mask in shown])  # [layers, kv_heads]
        self.even = bool((self._lengths == self._lengths[:, :1]).all())  # so that a decoder of the full graph can do it
        self._free_rows = int((cache.capacities - cache.lengths).min())
        self._appended = 0
        self._slots: list[list[NDArray[np.int64]]] = []  # of each layer and head, where the rows at the front were
        self._saved: list[tuple[NDArray, NDArray[np.int64], NDArray]] = []
        try:
            for buffer, mask, counts in zip(cache.buffers(), shown, self._lengths.tolist(), strict=True):
                memory = arrays_of(buffer)
                self._slots.append([self._move(memory, *each) for each in enumerate(zip(mask, counts, strict=True))])
        except BaseException:
            self.restore()
            raise

    def _move(self, memory: tuple[NDArray, NDArray], head: int, shown: tuple[Bool, int]) -> NDArray[np.int64]:
        """Move a head's rows to the front; returns where they were."""
        held, count = shown
        holes, after = np.flatnonzero(~held[:count]), count + np.flatnonzero(held[count:])
        over = np.concatenate([holes, np.arange(count, min(count + self._free_rows, len(held)))])
        for rows in (part[head] for part in memory):
            self._saved.append((rows, over, rows[over]))
            rows[holes] = rows[after]
        slots = np.arange(count)
        slots[holes] = after
        return slots

    def extend(self, rows: int) -> Int32:
        """Return where ``rows`` more rows go, ``[layers, kv_heads]``. Raises CacheFull if the whole cache has no room."""
        if self._appended + rows > self._free_rows:
            raise CacheFull(f"{self._appended} rows of text and {rows} more do not fit in {self._free_rows}")
        self._appended += rows
        past: Int32 = self._lengths + np.int32(self._appended - rows)
        return past

    def seen(self, layer: int, head: int) -> SeenRows:
        """The frames' rows that a KV head sees, their runs cut to the window: copies."""
        cache, (first, last), slot = self._cache, self._frames, self._slots[layer][head]
        of_frames = cache.kind(layer)[head, slot] == Kind.VISION
        key, slot = cache.dequantize("key", layer, slice(len(slot)))[head, of_frames], slot[of_frames]
        frame, row, col, confirmed = (part(layer)[head, slot] for part in (cache.frame, cache.row, cache.col, cache.confirmed))
        return SeenRows(key, np.maximum(frame, first), row, col, np.minimum(confirmed, last))

    def restore(self) -> None:
        """Put all rows back."""
        for rows, over, saved in self._saved:
            rows[over] = saved
        self._saved = []
