"""Answer questions about a time window by hiding the rows outside the window.

A row covers the time from its frame to the last frame that confirmed the row. A question always sees the prefix. A question
also sees the text around each frame that it sees. Summary rows have no time, so a question about a time window never sees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.engine import Decoder, Float32, StepResult
from edgevlm.runtime.evidence import FrameTimes, SeenRows

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A period of the stream, from ``since`` to ``until`` inclusive, in seconds."""

    since: float = -math.inf
    until: float = math.inf

    def frames(self, times: FrameTimes, now: float) -> tuple[int, int]:
        """Return the numbers of the window's first and last frame; in an empty window, the first number exceeds the last.

        ``now``: the stream's current time. The newest frame counts as visible until ``now``.
        """
        first, last = times.first_from(self.since), times.first_from(math.nextafter(self.until, math.inf)) - 1
        if last == times.newest:
            first = min(first, last) if self.since <= now else first
        return first, last


class NothingHeld(UserError):
    """Raised if the memory has no row from a time window. ``oldest_s``: the time of the oldest row; None if there is none."""

    def __init__(self, window: TimeWindow, oldest_s: float | None) -> None:
        since = "the beginning" if window.since == -math.inf else f"{window.since:.1f} s"
        until = "now" if window.until == math.inf else f"{window.until:.1f} s"
        reaches = "it is empty" if oldest_s is None else f"it reaches back to {oldest_s:.1f} s"
        super().__init__(f"the memory holds nothing from {since} to {until} of the stream; {reaches}")
        self.window, self.oldest_s = window, oldest_s


def rows_of(cache: KVCache, layer: int, first: int, last: int, newest: int) -> Bool:
    """Return the mask ``[kv_heads, n]`` of the rows in a layer that a question about some frames attends to.

    ``first``, ``last``: the first and last frame that the question is about. ``newest``: the stream's newest frame; higher
    numbers are the question's own pictures.
    """
    kind, frame = cache.kind(layer), cache.frame(layer)
    shown = (frame > newest) | ((frame <= last) & (cache.confirmed(layer) >= first))
    seen: Bool = (kind == Kind.VISION) & shown
    around = (frame < 0) | np.isin(frame, frame[seen])
    return seen | (kind == Kind.PREFIX) | ((kind == Kind.TEXT) & around)


class NarrowedMemory:
    """Limits a question to some rows of the cache. The question's own rows follow the cache's rows and are not committed."""

    def __init__(self, cache: KVCache, shown: Sequence[Bool], frames: tuple[int, int]) -> None:
        """Limit a question to some rows of the cache. ``shown``: each layer's mask of the visible rows, bool ``[kv_heads, n]``.

        ``frames``: the first and last frame that the question is about.
        """
        self._cache, self._frames = cache, frames
        self._shown = [[np.flatnonzero(head).astype(np.int32) for head in mask] for mask in shown]
        self._appended = 0

    def step(self, decoder: Decoder, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int]) -> StepResult:
        """Append rows of the question after its earlier rows. Takes the same arguments as :meth:`Decoder.step`."""
        held = self._cache.lengths
        before = np.arange(self._appended, dtype=np.int32)
        rows = [
            [np.concatenate([head, before + np.int32(start)]) for head in of_layer]
            for of_layer, start in zip(self._shown, held, strict=True)
        ]
        result = decoder.step(embeds, cos, sin, (held + self._appended).astype(np.int32), logit_rows, rows=rows)
        self._appended += len(embeds)
        return result

    def seen(self, layer: int, head: int) -> SeenRows:
        """Return copies of the frames' rows that a KV head sees. A row's period is clipped to the time window."""
        cache, (first, last), slot = self._cache, self._frames, self._shown[layer][head]
        slot = slot[cache.kind(layer)[head, slot] == Kind.VISION]
        key = cache.dequantize("key", layer)[head, slot]
        frame, row, col, confirmed = (part(layer)[head, slot] for part in (cache.frame, cache.row, cache.col, cache.confirmed))
        return SeenRows(key, np.maximum(frame, first), row, col, np.minimum(confirmed, last))
