"""The stream's position counter, how frames take their places, and when kept positions are made dense again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Reindexing = Literal["lazy", "eager", "never"]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
_ROUNDING = 1e-6  # of a position, against 0.1 * 30 being less than 3


def rope_tables(positions: Int32, inv_freq: Float32, pair_axis: NDArray[np.uint8] | None = None) -> tuple[Float32, Float32]:
    """cos and sin, each float32 ``[S, head_dim / 2]``, of positions ``[S]`` or ``[S, axes]``.

    With several axes ``pair_axis [head_dim / 2]`` names the one that each rotary pair turns by. Angles are float32, as
    transformers has them.
    """
    places = positions.reshape(len(positions), -1).astype(np.float32)
    angles = (places[:, :1] if pair_axis is None or places.shape[1] == 1 else places[:, pair_axis]) * inv_freq
    return np.cos(angles), np.sin(angles)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tokens of a frame take positions: see ``positions`` of :class:`~edgevlm.runtime.bundle.VisionSpec`."""

    rule: str = "rows"
    grid: tuple[int, int] = (1, 1)
    tokens_per_second: float | None = None
    axes: int = 1


@dataclass(slots=True)
class Positions:
    """Rotary positions of one stream: a row of text takes the next index on every axis, a frame what its layout says.

    limit: the smaller of the model's limit and the trained length written in the bundle. margin: min(1024, limit / 4), and
    never less than the text budget, so that a question always fits below the limit. (InfiniPot-V App. B.4, HERMES App. F.)
    next: 1 + the largest position taken, over all axes.
    """

    limit: int
    text_rows: int
    reindexing: Reindexing = "lazy"
    layout: Layout = field(default_factory=Layout)
    next: int = 0
    _start: int | None = None  # where the rows and columns of the video count from
    _time: int = 0  # the newest frame's place on the first axis
    _since: float = 0.0  # seconds of the video's first frame

    @property
    def margin(self) -> int:
        return max(min(1024, self.limit // 4), self.text_rows)

    def due(self, rows: int, compressed: bool) -> bool:
        """Whether to make positions dense before ``rows`` more are appended."""
        if self.reindexing == "never":
            return False
        return (compressed and self.reindexing == "eager") or self.next + rows > self.limit - self.margin

    def compact(self, cache: KVCache, prefix: int, gap: int = 0) -> None:
        """Replace kept positions by their dense rank per layer, head and axis; go on, with a new video, from the largest.

        gap: positions left free behind the prefix.
        """
        self.next, self._start = cache.reindex(prefix), None
        if gap:
            for layer in range(cache.layers):
                place = cache.position(layer)
                cache.shift(layer, np.where(place < prefix, place, place + gap).astype(np.int32))
            self.next += gap

    def mark(self) -> tuple[int, int | None, int, float]:
        """This moment, to :meth:`restore`."""
        return self.next, self._start, self._time, self._since

    def restore(self, mark: tuple[int, int | None, int, float]) -> None:
        self.next, self._start, self._time, self._since = mark

    def take(self, rows: int) -> Int32:
        """The positions of the next ``rows`` rows of text, ``[rows, axes]``."""
        places = np.arange(self.next, self.next + rows, dtype=np.int32)
        self.next += rows
        return np.repeat(places[:, None], self.layout.axes, 1)

    def frame(self, seconds: float) -> Int32:
        """The positions of the tokens of the next frame, seen at ``seconds``: ``[rows * columns, axes]``.

        ``video``: the frame advances by 1 or by the time that passed; rows and columns count from the video's start.
        ``frame``: all three count from the next index. (Qwen2-VL, arXiv 2409.12191, sec. 2.1; Qwen2.5-VL, 2502.13923, 2.1.2.)
        """
        rows, columns = self.layout.grid
        if self.layout.rule == "rows":
            return self.take(rows * columns)
        start = self._begin(seconds)
        places = np.empty((rows, columns, 3), np.int32)
        places[..., 0] = self._time
        places[..., 1] = start + np.arange(rows)[:, None]
        places[..., 2] = start + np.arange(columns)
        self.next = max(self.next, self._time + 1, start + max(rows, columns))
        return places.reshape(-1, 3)

    def _begin(self, seconds: float) -> int:
        """Set the place on the first axis; returns where rows and columns count from."""
        if self._start is None or self.layout.rule == "frame":
            self._start, self._time, self._since = self.next, self.next, seconds
        else:
            self._time = self._later(seconds)
        return self._start

    def _later(self, seconds: float) -> int:
        """The place of a later frame of a video: never before the one ahead of it, and not so far on that no text would fit."""
        if self.layout.tokens_per_second is None or self._start is None:
            return self._time + 1
        passed = int((seconds - self._since) * self.layout.tokens_per_second + _ROUNDING)
        furthest = max(self._time + 1, self.limit - self.margin - 1)
        return min(max(self._time, self._start + passed), furthest)
