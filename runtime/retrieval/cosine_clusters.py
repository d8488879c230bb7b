"""Mosaic's clusters by cosine: their allowed diversity (eqs. 1 to 5), their splits, and the partitions of frames."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import _native
from edgevlm.runtime.stateful import Stateful

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Thresholds = tuple[float, float, int]

RATE = 32.0  # beta of eq. 5
MIN_SIZE = 8  # a cluster of fewer is never over its threshold
MIN_VARIANCE = 1e-3  # the lowest threshold: members that are all one leave nothing to go by but rounding
KMEANS_ROUNDS = 8  # of k-means
EARLY_FRAMES = 16  # frames whose variance sets the threshold
NEVER = 0.0, 0.0, 2**62
"""Thresholds that no cluster exceeds."""


class EarlyVariance(Stateful):
    """The variance of the first ``rows`` rows of some streams, by eqs. 3 and 4, each as one cluster.

    ``mean`` float64 ``[streams, width]``, ``variance`` ``[streams]``, and ``seen`` rows of each.
    """

    state_fields = ("seen", "mean", "variance")

    def __init__(self, streams: int, width: int, rows: int) -> None:
        self.rows, self.seen = rows, np.zeros(1, np.int64)
        self.mean, self.variance = np.zeros((streams, width)), np.zeros(streams)

    def add(self, rows: Float32) -> None:
        """Add rows ``[streams, n, width]``; later ones than the first are ignored."""
        for row in rows.transpose(1, 0, 2)[: max(0, self.rows - int(self.seen[0]))].astype(np.float64):
            self.seen += 1
            self.mean += (row - self.mean) / self.seen
            self.variance += (1 - cosine(row, self.mean) - self.variance) / self.seen

    def thresholds(self, small: float, large: float) -> Thresholds:
        """Eq. 5: the largest variance of a small and a large cluster, multiples of the mean variance, and the least size.

        NEVER until all rows are there.
        """
        if self.seen < self.rows:
            return NEVER
        variance = float(self.variance.mean())
        return max(MIN_VARIANCE, small * variance), max(MIN_VARIANCE, large * variance), MIN_SIZE


def cosine(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """Cosine of vectors ``[..., width]``, 0 with a zero vector."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    dots = (a * b).sum(-1)
    return np.asarray(np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0))


def units(rows: NDArray[np.floating]) -> Float64:
    """Rows ``[n, width]`` of length 1 in float64, zero ones as they are."""
    wide = rows.astype(np.float64)
    length = np.linalg.norm(wide, axis=-1, keepdims=True)
    return np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)


def mean_and_variance(rows: NDArray[np.floating]) -> tuple[Float64, float]:
    """Eqs. 1 and 2 of rows ``[n, width]``: their mean, and their mean distance 1 - cos from it."""
    mean = rows.astype(np.float64).mean(0)
    return mean, float(np.mean(1 - units(rows) @ units(mean[None])[0]))


def pooled(mean: Float64, variance: Float64, size: NDArray[np.integer]) -> tuple[Float64, float]:
    """Mean and variance of clusters ``[m, width]``, ``[m]`` of ``size`` ``[m]`` taken as one.

    The mean is exact; the variance adds each cluster's distance from the new mean to its own.
    """
    weight = size / size.sum()
    joint = weight @ mean
    return joint, float(weight @ (variance + 1 - cosine(mean, joint)))


def split_in_two(rows: NDArray[np.floating]) -> NDArray[np.bool_]:
    """K-means for two by cosine, of rows ``[n, width]``; returns the rows of the second cluster, bool ``[n]``.

    It begins with the row least like the mean and the row least like that one. Nothing is in the second if all rows are
    parallel.
    """
    unit = units(rows)
    first = unit[np.argmin(unit @ units(unit.mean(0)[None])[0])]
    centre = np.stack([first, unit[np.argmin(unit @ first)]])
    second = np.zeros(len(rows), np.bool_)
    for _ in range(KMEANS_ROUNDS):
        similar = unit @ centre.T
        now = similar[:, 1] > similar[:, 0]
        if now.all() or not now.any() or np.array_equal(now, second):
            break
        second = now
        centre = units(np.stack([rows[~now].astype(np.float64).mean(0), rows[now].astype(np.float64).mean(0)]))
    return second


def nearest_pairs(unit: NDArray[np.float64], label: NDArray[np.integer], count: int) -> list[tuple[int, int]]:
    """Return up to ``count`` disjoint pairs of rows of one label, most similar first: (lower, higher) indices."""
    similar = np.where(np.triu(label[:, None] == label, 1), unit @ unit.T, -np.inf)
    pairs: list[tuple[int, int]] = []
    used = np.zeros(len(unit), np.bool_)
    for flat in np.argsort(-similar, axis=None, kind="stable"):
        first, second = divmod(int(flat), len(unit))
        if len(pairs) == count or similar[first, second] == -np.inf:
            break
        if not used[first] and not used[second]:
            pairs.append((first, second))
            used[[first, second]] = True
    return pairs


class Partitions(Stateful):
    """Up to ``slots`` clusters of pooled frame features ``[width]``, and the partition of each of the last frames.

    A partition is not split, since that would fetch all rows of its frames: the frame that would exceed its threshold founds
    another one. Without a free slot the two most similar merge. small, large: multiples of the early variance.
    """

    state_fields = ("mean", "variance", "size", "taken", "_of", "_early")

    def __init__(self, slots: int, width: int, frames: int, small: float, large: float) -> None:
        self.slots, self._times = slots, (small, large)
        self.mean, self.variance = np.zeros((slots, width), np.float32), np.zeros(slots)
        self.size, self.taken = np.zeros(slots, np.int64), np.full(slots, -1, np.int32)  # taken: 0, or -1
        self._of = np.zeros(frames, np.int32)
        self._early = EarlyVariance(1, width, EARLY_FRAMES)
        self.merged = 0

    @staticmethod
    def slot_bytes(width: int) -> int:
        return 4 * width + 8 + 8 + 4

    def of(self, frames: NDArray[np.integer]) -> NDArray[np.int32]:
        """The partition of each of ``frames``, of those last taken in."""
        return self._of[frames % len(self._of)]

    def take(self, frames: NDArray[np.integer], features: Float32) -> list[tuple[int, int]]:
        """Add frames ``[n]`` with features ``[n, width]``; returns the merges on the way: (kept, gone)."""
        joined: list[tuple[int, int]] = []
        rows = np.ascontiguousarray(features, np.float32)
        for at, frame in enumerate(frames.tolist()):
            self._early.add(rows[None, at : at + 1])
            self._of[frame % len(self._of)] = self._assign(rows[at : at + 1], joined)
        return joined

    def _assign(self, row: Float32, joined: list[tuple[int, int]]) -> int:
        slot, where = np.zeros(1, np.int32), np.zeros(1, np.int32)
        small, large, least = self._early.thresholds(*self._times) if self.slots > 1 else NEVER
        table = (self.mean, self.variance, self.size, self.taken)
        if _native.mosaic_assign(row, where, 0, *table, small, large, RATE, least, slot)[0]:
            return int(slot[0])
        free = np.flatnonzero(self.taken < 0)
        at = int(free[0]) if len(free) else self._merge(joined)
        self.mean[at], self.variance[at], self.size[at], self.taken[at] = row[0], 0, 1, 0
        return at

    def _merge(self, joined: list[tuple[int, int]]) -> int:
        """Merge the two most similar; returns the slot that this frees."""
        into, gone = nearest_pairs(units(self.mean), np.zeros(self.slots, np.int32), 1)[0]
        pair = [into, gone]
        self.mean[into], self.variance[into] = pooled(self.mean[pair].astype(np.float64), self.variance[pair], self.size[pair])
        self.size[into] += self.size[gone]
        self._of[self._of == gone] = into
        joined.append((into, gone))
        self.merged += 1
        return gone
