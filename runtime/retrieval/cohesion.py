"""How alike the members of a cluster are, and when they are too unlike: Mosaic's eqs. 1 to 5, and k-means for two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.stateful import Stateful

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

RATE = 32.0  # beta of eq. 5
LEAST = 8  # a cluster of fewer is never over its threshold
FLOOR = 1e-3  # the lowest threshold: members that are all one leave nothing to go by but rounding
ROUNDS = 8  # of k-means


@dataclass(frozen=True, slots=True)
class Threshold:
    """Eq. 5: the most variance that a cluster of n members may have, from ``small`` on, towards ``large`` as it grows."""

    small: float
    large: float

    def at(self, size: int) -> float:
        return self.large - (self.large - self.small) * math.exp(-size / RATE)

    def over(self, variance: float, size: int) -> bool:
        return size >= LEAST and variance > self.at(size)


class Early(Stateful):
    """The variance of the first ``rows`` rows of each of some streams, by eqs. 3 and 4, each as one cluster.

    ``mean`` float64 ``[streams, width]``, ``variance`` ``[streams]``, and ``seen`` rows of each.
    """

    state_fields = ("seen", "mean", "variance")

    def __init__(self, streams: int, width: int, rows: int) -> None:
        self.rows, self.seen = rows, np.zeros(1, np.int64)
        self.mean, self.variance = np.zeros((streams, width)), np.zeros(streams)

    def add(self, rows: Float32) -> None:
        """Rows ``[streams, n, width]``; those behind the first are nothing to it."""
        for row in rows.transpose(1, 0, 2)[: max(0, self.rows - int(self.seen[0]))].astype(np.float64):
            self.seen += 1
            self.mean += (row - self.mean) / self.seen
            self.variance += (1 - cosine(row, self.mean) - self.variance) / self.seen

    def threshold(self, small: float, large: float) -> Threshold | None:
        """So many times the variance, the mean over the streams; None until all the rows were there."""
        if self.seen < self.rows:
            return None
        variance = float(self.variance.mean())
        return Threshold(max(FLOOR, small * variance), max(FLOOR, large * variance))


def cosine(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """Of vectors ``[..., width]``, 0 with a zero vector."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    dots = (a * b).sum(-1)
    return np.asarray(np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0))


def units(rows: NDArray[np.floating]) -> Float64:
    """Rows ``[n, width]`` of length 1 in float64, zero ones as they are."""
    wide = rows.astype(np.float64)
    length = np.linalg.norm(wide, axis=-1, keepdims=True)
    return np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)


def spread(rows: NDArray[np.floating]) -> tuple[Float64, float]:
    """Eqs. 1 and 2 of rows ``[n, width]``: their mean, and their mean distance 1 - cos from it."""
    mean = rows.astype(np.float64).mean(0)
    return mean, float(np.mean(1 - units(rows) @ units(mean[None])[0]))


def pooled(mean: Float64, variance: Float64, size: NDArray[np.integer]) -> tuple[Float64, float]:
    """Mean and variance of clusters taken as one, from ``[m, width]``, ``[m]`` and ``[m]`` alone.

    The mean is exact; the variance takes each cluster's members to be as far from the new mean as from their own, and further
    by as much as that has moved.
    """
    share = size / size.sum()
    joint = share @ mean
    return joint, float(share @ (variance + 1 - cosine(mean, joint)))


def halves(rows: NDArray[np.floating]) -> NDArray[np.bool_]:
    """K-means for two by cosine, of rows ``[n, width]``: which of them the second cluster gets, ``[n]``.

    It begins with the row least like the mean and the row least like that one; of equal ones the first. None are in the second
    if all rows point one way.
    """
    unit = units(rows)
    first = unit[np.argmin(unit @ units(unit.mean(0)[None])[0])]
    centre = np.stack([first, unit[np.argmin(unit @ first)]])
    second = np.zeros(len(rows), np.bool_)
    for _ in range(ROUNDS):
        alike = unit @ centre.T
        now = alike[:, 1] > alike[:, 0]
        if now.all() or not now.any() or np.array_equal(now, second):
            break
        second = now
        centre = units(np.stack([rows[~now].astype(np.float64).mean(0), rows[now].astype(np.float64).mean(0)]))
    return second
