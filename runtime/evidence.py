"""Find the frames that an answer was read from, using the attention of the question's last row in one layer.

Every engine can return the query of the question's last row. On the demo model, two heads of the last layer attend to the
object in question (docs/internals/evidence.md); no such heads are known in other models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.calibration import EvidenceHeads
from edgevlm.runtime.stateful import State, Stateful

MOMENTS = 3
LEAST = 0.02
LEAST_ROW = 1e-3
LIT = 0.25  # a box covers patches with at least this fraction of the best patch's weight
KNOTS = 4096
CLOSE_S = 0.5

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Integers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Moment:
    """A frame that an answer was read from.

    ``last_frame``: the last frame before the attended patches changed. ``time_s``, ``until_s``: the times of ``frame`` and
    ``last_frame``, in seconds of the stream. ``weight``: this frame's fraction of the attention to all frames, 0 to 1. ``box``:
    the left, top, right and bottom of the attended patches, as fractions of the picture.
    """

    frame: int
    last_frame: int
    time_s: float
    until_s: float
    weight: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The moments that an answer was read from, best first.

    ``held``: False if a calibrated rule finds that the answer's frames are no longer in the memory. ``held`` is None without a
    calibrated rule, and for a question about a time window.
    """

    moments: tuple[Moment, ...]
    held: bool | None


class SeenRows(NamedTuple):
    """The keys and metadata of the frames' rows that one KV head saw. ``key``: float32 ``[n, head_dim]``."""

    key: Float32
    frame: Integers
    row: Integers
    col: Integers
    confirmed: Integers


def seen_rows(cache: KVCache, layer: int, head: int) -> SeenRows:
    """Return one KV head's vision rows. All arrays are copies, except float32 keys, which later steps may change."""
    found = np.flatnonzero(cache.kind(layer)[head] == Kind.VISION)
    together = len(found) and found[-1] - found[0] + 1 == len(found)
    rows = slice(found[0], found[-1] + 1) if together else found
    key = cache.key(layer)[head] if cache.dtype == np.float32 else cache.dequantize("key", layer)[head]
    known = (part(layer)[head, rows].copy() for part in (cache.frame, cache.row, cache.col, cache.confirmed))
    return SeenRows(key[rows], *known)


class QuestionAttention:
    """The attention of one row of a question, copied so that :meth:`evidence` can evaluate it later.

    ``groups``: for each KV head, the queries ``[h, head_dim]`` and the rows that the head saw. ``grid``: the (rows, columns) of
    a frame's tokens. ``group``: the number of frames that share one grid. ``logits``: the logits ``[vocabulary]`` of the token
    after the row. ``lossless``: whether no row has left the memory.
    """

    def __init__(
        self,
        groups: Iterable[tuple[Float32, Sequence[SeenRows]]],
        heads: EvidenceHeads,
        grid: tuple[int, int],
        group: int,
        times: FrameTimes,
        logits: Float32,
        lossless: bool = False,
    ) -> None:
        self._heads, self._grid, self._group, self._times, self._lossless = heads, grid, group, copy(times), lossless
        self._sure = _certainty(logits)
        self.scores: list[tuple[Float32, Float32, Sequence[Integers]]] = []  # for each KV head: scores, query norms and rows
        for queries, parts in groups:
            seen = parts[0] if len(parts) == 1 else SeenRows(*map(np.concatenate, zip(*parts, strict=True)))
            score = np.ascontiguousarray((seen.key @ (queries.T / np.float32(np.sqrt(queries.shape[1])))).T)
            self.scores.append((score, np.sqrt((queries * queries).sum(1)), seen[1:]))

    @property
    def blind(self) -> bool:
        return any(not score.size for score, *_ in self.scores)

    @property
    def features(self) -> Float64:
        """Return the numbers from which a calibrated rule decides whether the memory holds the evidence: each head's best
        score, median score and query norm, then the next token's logit, log-probability and entropy.
        """
        parts = (zip(score.max(1), _medians(score), length, strict=True) for score, length, _ in self.scores)
        return np.array([*chain.from_iterable(chain.from_iterable(parts)), *self._sure], np.float64)

    def weights(self) -> tuple[Int64, Int64, Float64]:
        """Return the frame tokens that the question attended to, the last frame that showed each token, and each token's
        weight.

        Tokens are numbered ``frame * tokens + patch``. A token's weight is its softmax weight among all frames' rows, averaged
        over the query heads. Rows whose weight is below LEAST_ROW times the largest weight are skipped.
        """
        token, confirmed, weight = [], [], []
        for score, _, known in self.scores:
            weights = np.exp(score - score.max(1, keepdims=True))
            carried = (1 / weights.sum(1)) @ weights
            lit = np.flatnonzero(carried >= LEAST_ROW * carried.max())
            frame, row, col, last = (part[lit].astype(np.int64) for part in known)
            token.append((frame * self._grid[0] + row) * self._grid[1] + col)
            confirmed.append(last)
            weight.append(carried[lit])
        heads = sum(len(score) for score, *_ in self.scores)
        if len(token) == 1:  # one KV head holds each token only once
            return token[0], confirmed[0], weight[0] / heads
        found, place = np.unique(np.concatenate(token), return_inverse=True)
        last_shown = np.zeros(len(found), np.int64)
        np.maximum.at(last_shown, place, np.concatenate(confirmed))
        return found, last_shown, np.bincount(place, np.concatenate(weight)) / heads

    def evidence(self) -> Evidence:
        """Return the frames with the most weight, at most MOMENTS of them and none below LEAST."""
        rule, times, (rows, columns) = self._heads, self._times, self._grid
        if self.blind:
            return Evidence((), False if rule.weights else None)
        held = self._lossless or bool(self.features @ rule.weights + rule.bias > 0) if rule.weights else None
        by_frame: dict[int, list[tuple[float, int, int]]] = {}  # (weight, patch, frame that last showed the patch)
        for token, last, weight in zip(*(part.tolist() for part in self.weights()), strict=True):
            by_frame.setdefault(token // (rows * columns), []).append((weight, token % (rows * columns), last))
        seen = {frame: sum(weight for weight, *_ in of) for frame, of in by_frame.items() if frame <= times.newest}
        moments = []
        for frame in sorted(seen, key=lambda frame: (-seen[frame], frame))[:MOMENTS]:
            if seen[frame] < LEAST:
                break
            least = LIT * max(by_frame[frame])[0]
            lit = [(patch, last) for weight, patch, last in by_frame[frame] if weight >= least]
            last = max(frame, *(last for _, last in lit))
            row, col = np.divmod([patch for patch, _ in lit], columns)
            edges = np.array([col.min(), row.min(), col.max() + 1, row.max() + 1]) / (columns, rows, columns, rows)
            left, top, right, bottom = edges.round(4).tolist()
            weight, at, until = round(seen[frame], 4), times.at(frame), times.at(last)
            moments.append(Moment(frame * self._group, last * self._group, at, until, weight, (left, top, right, bottom)))
        return Evidence(tuple(moments), held)


def _medians(score: Float32) -> Float32:
    """Return the median of each row several times faster than ``np.median``."""
    low, high = (score.shape[1] - 1) // 2, score.shape[1] // 2
    middle = np.partition(score, (low, high), axis=1)
    return (middle[:, low] + middle[:, high]) * np.float32(0.5)


def _certainty(logits: Float32) -> Float64:
    best = float(logits.max())
    shifted = np.maximum(logits.astype(np.float64) - best, -700.0)  # bounded, because 0 * infinity would be NaN
    weights = np.exp(shifted)
    total = weights.sum()
    return np.array([best, -np.log(total), np.log(total) - weights @ shifted / total])


class FrameTimes(Stateful):
    """The times of frames, in seconds, interpolated between at most KNOTS recorded times.

    To make room for another time, times that interpolation restores to within CLOSE_S seconds are dropped. If there are none,
    every second time in the older half is dropped. Arrays are replaced, never modified, so shallow copies stay valid.
    """

    state_fields = ("frame", "seconds")

    def __init__(self) -> None:
        self.frame, self.seconds = np.zeros(0, np.int64), np.zeros(0)

    def restore(self, state: State) -> None:
        super().restore(state)
        if self.frame.shape != self.seconds.shape or len(self.frame) > KNOTS:
            raise ValueError("invalid frame times")

    def add(self, frame: int, seconds: float) -> None:
        """Record a frame's time in seconds, and drop the recorded times of later frames."""
        count = int(np.searchsorted(self.frame, frame))
        kept = self._thinned() if count == KNOTS else slice(count)
        self.frame, self.seconds = np.append(self.frame[kept], frame), np.append(self.seconds[kept], seconds)

    @property
    def newest(self) -> int:
        """The newest frame with a recorded time, or -1."""
        return int(self.frame[-1]) if len(self.frame) else -1

    def at(self, frame: int) -> float:
        """Return the time of a frame; 0 if no time is recorded."""
        return float(np.interp(frame, self.frame, self.seconds)) if len(self.frame) else 0.0

    def first_from(self, seconds: float) -> int:
        """Return the first frame seen at this time or later, or the newest frame's number plus 1 if there is none."""
        return bisect_left(range(self.newest + 1), seconds, key=self.at)

    def _thinned(self) -> Int64:
        frame, seconds, middle = self.frame, self.seconds, np.arange(1, KNOTS - 1, 2)
        between = seconds[middle - 1] + (seconds[middle + 1] - seconds[middle - 1]) * (
            (frame[middle] - frame[middle - 1]) / (frame[middle + 1] - frame[middle - 1])
        )
        gone = middle[np.abs(between - seconds[middle]) <= CLOSE_S]
        return np.delete(np.arange(KNOTS), gone if len(gone) else middle[: len(middle) // 2])
