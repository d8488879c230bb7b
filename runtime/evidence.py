"""Which frames an answer was read from, by the attention of the question's last row in one layer.

Its query is a probe, as policies have them, so every engine can give it. On the demo model two heads of the last layer look
straight at the object asked about (docs/internals/evidence.md); for other models nobody knows the right heads yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.calibration import EvidenceHeads
from edgevlm.runtime.stateful import Stateful

MOMENTS = 3  # frames that are named, at most
LEAST = 0.02  # of the attention to all frames, for a frame to be named
LIT = 0.25  # of the frame's best patch, for a patch to be in the box
KNOTS = 4096  # frames whose times are kept
CLOSE_S = 0.5  # seconds that an interpolated time may be off before a knot is kept for it

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Integers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Moment:
    """A frame that an answer was read from.

    frame: its number; last_frame: the last one until which the patches looked at had not changed. time_s, until_s: when both
    were seen, seconds of the stream. weight: share of the attention to all frames, 0 to 1. box: left, top, right, bottom of the
    patches looked at, as fractions of the picture.
    """

    frame: int
    last_frame: int
    time_s: float
    until_s: float
    weight: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an answer was read from. moments: best first.

    held: False where what would answer the question is no longer in memory, by a rule that was calibrated; None without one.
    """

    moments: tuple[Moment, ...]
    held: bool | None


class Seen(NamedTuple):
    """The vision rows that one head saw: keys float32 ``[n, head_dim]``, and of each row its frame, patch and last frame."""

    key: Float32
    frame: Int64
    patch: Int64
    confirmed: Int64

    @classmethod
    def of(cls, key: Float32, frame: Integers, row: Integers, col: Integers, confirmed: Integers, columns: int) -> Seen:
        """Rows as a cache or a block has them. columns: of a frame's grid of tokens."""
        return cls(key, frame.astype(np.int64), row.astype(np.int64) * columns + col, confirmed.astype(np.int64))

    def plus(self, more: Seen) -> Seen:
        """These rows and then ``more``."""
        return Seen(*(np.concatenate(parts) for parts in zip(self, more, strict=True)))


class Look(NamedTuple):
    """What the heads looked at: each token ``frame * tokens + patch`` once, the frame that last showed it, and its weight.

    features: each head's best and median score, ``[2 x heads]``.
    """

    token: Int64
    confirmed: Int64
    weight: Float64
    features: Float64


def look(seen: Iterable[tuple[Float32, Seen]], tokens: int) -> Look | None:
    """Softmax of each query ``[head_dim]`` over the rows its head saw, averaged over heads; None where a head saw no frame.

    It is the attention that a decoder's layer computes, over vision rows alone. tokens: of a frame.
    """
    token, confirmed, weight, features = [], [], [], []
    for query, rows in seen:
        if not len(rows.frame):
            return None
        score = (rows.key @ query).astype(np.float64) / np.sqrt(len(query))
        shares = np.exp(score - score.max())
        token.append(rows.frame * tokens + rows.patch)
        confirmed.append(rows.confirmed)
        weight.append(shares / shares.sum())
        features += [float(score.max()), float(np.median(score))]
    found, place = np.unique(np.concatenate(token), return_inverse=True)
    total, last = np.zeros(len(found)), np.zeros(len(found), np.int64)
    np.add.at(total, place, np.concatenate(weight) / len(weight))
    np.maximum.at(last, place, np.concatenate(confirmed))
    return Look(found, last, total, np.array(features))


def seen_rows(cache: KVCache, layer: int, columns: int) -> list[Seen]:
    """The vision rows that each KV head of a layer holds. columns: of a frame's grid of tokens."""
    key, kind = cache.dequantize("key", layer), cache.kind(layer)
    parts = [part(layer) for part in (cache.frame, cache.row, cache.col, cache.confirmed)]
    vision = kind == Kind.VISION
    return [
        Seen.of(key[head, rows], *(part[head, rows] for part in parts), columns=columns) for head, rows in enumerate(vision)
    ]


def find_evidence(found: Look | None, heads: EvidenceHeads, grid: tuple[int, int], group: int, times: FrameTimes) -> Evidence:
    """The frames that carry the weight. grid: of a frame's tokens, (rows, columns); group: frames that share one grid."""
    if found is None:
        return Evidence((), False if heads.weights else None)
    held = bool(found.features @ heads.weights + heads.bias > 0) if heads.weights else None
    tokens = grid[0] * grid[1]
    frames, place = np.unique(found.token // tokens, return_inverse=True)
    weights = np.bincount(place, found.weight)
    moments = []
    for index in np.argsort(-weights, kind="stable")[:MOMENTS]:
        if weights[index] < LEAST:
            break
        mine = place == index
        lit = mine & (found.weight >= LIT * found.weight[mine].max())
        number, last = int(frames[index]), int(found.confirmed[lit].max())
        moments.append(
            Moment(
                number * group,
                max(last, number) * group,
                times.at(number),
                times.at(max(last, number)),
                round(float(weights[index]), 4),
                _box(found.token[lit] % tokens, grid),
            )
        )
    return Evidence(tuple(moments), held)


def _box(patches: Int64, grid: tuple[int, int]) -> tuple[float, float, float, float]:
    rows, columns = np.divmod(patches, grid[1])
    left, right, top, bottom = columns.min(), columns.max() + 1, rows.min(), rows.max() + 1
    edges = (left / grid[1], top / grid[0], right / grid[1], bottom / grid[0])
    return tuple(round(float(edge), 4) for edge in edges)  # type: ignore[return-value]


class FrameTimes(Stateful):
    """When frames were seen, in seconds: as few numbers as say it within half a second, and never more than ``KNOTS``.

    What lies between two of them is interpolated. When even those are too many, every second one of the older half goes.
    """

    state_fields = ("_frame", "_seconds", "_count")

    def __init__(self) -> None:
        self._frame, self._seconds = np.zeros(KNOTS, np.int64), np.zeros(KNOTS)
        self._count = 0

    def add(self, frame: int, seconds: float) -> None:
        """Note a frame; those from ``frame`` on that were noted before are forgotten."""
        self._count = int(np.searchsorted(self._frame[: self._count], frame))
        if self._count == KNOTS:
            self._thin()
        self._frame[self._count], self._seconds[self._count] = frame, seconds
        self._count += 1

    def at(self, frame: int) -> float:
        """When a frame was seen; 0 before any was."""
        if not self._count:
            return 0.0
        return float(np.interp(frame, self._frame[: self._count], self._seconds[: self._count]))

    def _thin(self) -> None:
        frame, seconds = self._frame[: self._count], self._seconds[: self._count]
        middle = np.arange(1, self._count - 1, 2)
        between = seconds[middle - 1] + (seconds[middle + 1] - seconds[middle - 1]) * (
            (frame[middle] - frame[middle - 1]) / (frame[middle + 1] - frame[middle - 1])
        )
        gone = middle[np.abs(between - seconds[middle]) <= CLOSE_S]
        if not len(gone):
            gone = middle[: len(middle) // 2]
        keep = np.ones(self._count, bool)
        keep[gone] = False
        count = int(keep.sum())
        self._frame[:count], self._seconds[:count] = frame[keep], seconds[keep]
        self._count = count
