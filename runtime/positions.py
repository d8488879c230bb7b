"""Assign rotary positions to a stream's text and frames, and re-index the positions of kept rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Reindexing = Literal["lazy", "eager", "never"]
Mark = tuple[int, int | None, int, float, int | None]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
VIDEO_RULES = {
    "trained": "video",
    "transformers": "transformers",
}
_ROUNDING = 1e-6  # added to positions before rounding down, because 0.1 * 30 may be less than 3


def rope_tables(positions: Int32, inv_freq: Float32, pair_axis: NDArray[np.uint8] | None = None) -> tuple[Float32, Float32]:
    """Return the cosines and sines that rotate rows to their positions, each float32 ``[S, head_dim / 2]``.

    ``positions``: ``[S]`` or ``[S, axes]``. ``pair_axis``: with several axes, the axis that rotates each rotary pair. Angles
    are float32.
    """
    flat = positions.reshape(len(positions), -1).astype(np.float32)
    angles = (flat[:, :1] if pair_axis is None or flat.shape[1] == 1 else flat[:, pair_axis]) * inv_freq
    return np.cos(angles), np.sin(angles)


def position_rule(rule: str, wanted: str) -> str:
    """Return the requested rule if the bundle treats the stream as one video, otherwise the bundle's own rule."""
    return VIDEO_RULES[wanted] if rule in VIDEO_RULES.values() else rule


@dataclass(slots=True)
class Positions:
    """Counts the rotary positions of one stream.

    Text takes the next position on every axis; frames follow ``rule``. ``limit``: the smaller of the model's limit and the
    trained length written in the bundle. ``grid``, ``tokens_per_second`` and ``rule`` come from a
    :class:`~edgevlm.runtime.bundle.VisionSpec`, where the rule is named ``positions``. ``next``: the first position that is
    free on every axis. ``margin`` is min(1024, limit / 4), but at least the text budget (InfiniPot-V, appendix B.4; HERMES,
    appendix F). The margin leaves room for a question below the limit.
    """

    limit: int
    text_rows: int
    reindexing: Reindexing = "lazy"
    rule: str = "rows"
    grid: tuple[int, int] = (1, 1)
    tokens_per_second: float | None = None
    axes: int = 1
    next: int = 0
    _start: int | None = None  # the first position of the video's rows and columns
    _time: int = 0
    _since: float = 0.0  # the time of the video's first frame, in seconds
    _text: int | None = None

    @property
    def margin(self) -> int:
        return max(min(1024, self.limit // 4), self.text_rows)

    def due(self, rows: int, compressed: bool) -> bool:
        """Return whether the positions must be re-indexed before this many rows are appended."""
        if self.reindexing == "never":
            return False
        return (compressed and self.reindexing == "eager") or self.next + rows > self.limit - self.margin

    def compact(self, cache: KVCache, prefix: int, gap: int = 0) -> None:
        """Renumber the positions of kept rows without gaps, in each layer, head and axis. The next frame begins a new video.

        ``gap``: how many positions to leave free after the prefix.
        """
        self.next, self._start, self._text = cache.reindex(prefix), None, None
        if gap:
            for layer in range(cache.layers):
                position = cache.position(layer)
                cache.shift(layer, np.where(position < prefix, position, position + gap).astype(np.int32))
            self.next += gap

    def mark(self) -> Mark:
        """Return the current state, which :meth:`restore` accepts."""
        return self.next, self._start, self._time, self._since, self._text

    def restore(self, mark: Mark) -> None:
        self.next, self._start, self._time, self._since, self._text = (*mark, None)[:5]  # older snapshots lack the last value

    def take(self, rows: int) -> Int32:
        """Return the positions of the next rows of text, ``[rows, axes]``."""
        first = self.next if self._text is None else self._text
        self.next = max(self.next, first + rows)
        if self._text is not None:
            self._text = first + rows
        return np.repeat(np.arange(first, first + rows, dtype=np.int32)[:, None], self.axes, 1)

    def frame(self, seconds: float, tokens: NDArray[np.bool_] | None = None) -> Int32:
        """Return the positions of the next frame's tokens, ``[tokens, axes]``.

        ``seconds``: the frame's time. ``tokens``: the mask of tokens to append, bool ``[rows * columns]``, by default all. Rule
        ``rows`` leaves no gaps between positions. Rule ``video`` counts rows and columns from the video's start, and advances
        the frame coordinate by 1 per frame or by ``tokens_per_second`` per second. With rule ``frame``, each frame's
        coordinates start at the next free position (Qwen2-VL, arXiv 2409.12191, sec. 2.1; Qwen2.5-VL, 2502.13923, 2.1.2). Rule
        ``transformers`` is like ``video``, but text continues after the largest row or column (transformers 5.23 and later).
        """
        rows, columns = self.grid
        if self.rule == "rows":
            return self.take(rows * columns if tokens is None else int(tokens.sum()))
        if self._start is None or self.rule == "frame":
            self._start = self._time = self.next
            self._since = seconds
        elif self.tokens_per_second is None:
            self._time += 1
        else:  # a frame's position is never below the previous frame's, nor so high that no text would fit
            passed = int((seconds - self._since) * self.tokens_per_second + _ROUNDING)
            furthest = max(self._time + 1, self.limit - self.margin - 1)
            self._time = min(max(self._time, self._start + passed), furthest)
        positions = np.empty((rows, columns, 3), np.int32)
        positions[..., 0] = self._time
        positions[..., 1] = self._start + np.arange(rows)[:, None]
        positions[..., 2] = self._start + np.arange(columns)
        edge = self._start + max(rows, columns)
        self.next = max(self.next, self._time + 1, edge)
        self._text = edge if self.rule == "transformers" else None
        return positions.reshape(-1, 3)[slice(None) if tokens is None else tokens]
