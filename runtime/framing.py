"""What enters the memory for a frame: its features, the text around them, and their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.engine import FramePattern
from edgevlm.runtime.positions import FrameLayout, Positions

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
_FURTHEST = 10 * 365.25 * 86400.0  # seconds: no stream's time is longer when written


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows to append: ``embeds`` float32 ``[n, width]``, and what is known of each; ``seq`` counts from 0."""

    embeds: Float32
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, seq: int) -> Rows:
        """The rows, the first in place ``seq`` of the stream."""
        return replace(self.rows, seq=np.arange(seq, seq + len(self), dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Embedded]) -> Embedded:
        """One after the other; one at least."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.embeds for part in parts]), Rows.joined([part.rows for part in parts]))


class Framing:
    """Makes the rows of frames: ``before``, the grid of tokens, ``after``.

    embed: text to float32 ``[n, hidden]``.
    """

    def __init__(self, bundle: Bundle, embed: Callable[[str], Float32]) -> None:
        vision = self.vision = bundle.vision
        self._embed, self._width = embed, bundle.decoder.row_width
        self.layout = FrameLayout(vision.positions, vision.grid, vision.tokens_per_second, bundle.decoder.axes)
        rows, columns = vision.grid
        self._row = np.repeat(np.arange(rows, dtype=np.int16), columns)
        self._col = np.tile(np.arange(columns, dtype=np.int16), rows)

    def rows(
        self, features: Float32, seconds: Float64, first: int, positions: Positions, tokens: NDArray[np.bool_] | None = None
    ) -> Embedded:
        """Make the rows of grids ``features [G, tokens_per_frame, width]``, of frames numbered from ``first`` on.

        seconds: float64 ``[G, 2]``, of the first and the last frame of each. Takes their positions. tokens: bool
        ``[tokens_per_frame]``, those of each grid to append, all unless given.
        """
        parts, which = [], slice(None) if tokens is None else tokens
        for frame, (grid, (since, until)) in enumerate(zip(features, seconds, strict=True), first):
            before, after = _at((since + until) / 2, self.vision.before, self.vision.after)
            parts += self._text(before, frame, positions)
            known = Rows.text(positions.frame(float(since), tokens), Kind.VISION, frame)
            parts.append(Embedded(grid[which], replace(known, row=self._row[which], col=self._col[which])))
            parts += self._text(after, frame, positions)
        return Embedded.joined(parts)

    def _text(self, text: str, frame: int, positions: Positions) -> list[Embedded]:
        known = self._embed(text) if text else ()
        if not len(known):
            return []
        embeds = np.zeros((len(known), self._width), np.float32)
        embeds[:, : known.shape[1]] = known  # type: ignore[union-attr]
        return [Embedded(embeds, Rows.text(positions.take(len(known)), frame=frame))]


def most_text(before: str, after: str, encode: Callable[[str], Sequence[int]]) -> int:
    """The most tokens that the text around a grid takes at any time of a stream."""
    return sum(len(encode(text)) for text in _at(_FURTHEST, before, after) if text)


def _at(seconds: float, *texts: str) -> list[str]:
    """Texts of a bundle's manifest with the time in them."""
    full_seconds = int(seconds)
    return [text.format(seconds=seconds, minutes=full_seconds // 60, second=full_seconds % 60) for text in texts]


def frame_pattern(cache: KVCache, prefix: int, frame: int, grid: tuple[int, int]) -> FramePattern:
    """What the frames of a prefill see of the memory under PureKV's ST-SpAttn (arXiv 2510.25600, sec. 3.2).

    A token sees the prefix, frame 0, its own frame up to itself, and the token at its own patch in the frame before. Holes are
    filled from the tail and prefix and frame 0 never leave, so these two stay where they were first written: slots
    ``[0, prefix + tokens_per_frame)`` of every layer and head. A frame's token before it may be in another slot of each head.

    The pattern is of a call whose first frame is ``frame`` (1 or later) of ``grid`` (rows, columns) tokens. Raises CacheError
    if frame 0 has left its place.
    """
    rows, columns = grid
    shared = prefix + rows * columns
    previous = np.full((cache.layers, cache.kv_heads, rows * columns), -1, np.int64)
    for layer in range(cache.layers):
        vision = cache.kind(layer) == Kind.VISION
        first = (vision & (cache.frame(layer) == 0))[:, prefix:shared]
        if frame < 1 or first.size != previous[layer].size or not first.all():
            raise CacheError(f"layer {layer}: ST-SpAttn needs frame 0 in rows {prefix} to {shared}, and it is not there")
        if frame == 1:
            continue  # the frame before is frame 0, which every token sees
        head, slot = np.nonzero(vision & (cache.frame(layer) == frame - 1))
        place = cache.row(layer)[head, slot].astype(np.int64) * columns + cache.col(layer)[head, slot]
        previous[layer, head, place] = slot
    return FramePattern(shared, previous)
