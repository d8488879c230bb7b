"""Compute fractions, means and paired differences with 95 % confidence intervals.

Intervals are clustered by stream, because a stream's questions are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Z = 1.959964
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # Student's t for 1 to 10 degrees of freedom

Cluster = Sequence[bool]
Values = Sequence[float]  # a cluster's values


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval, from ``count`` questions in ``clusters`` streams."""

    value: float
    low: float
    high: float
    clusters: int
    count: int


def fraction_right(clusters: Sequence[Cluster]) -> Estimate:
    """Return the fraction of questions answered right, with Wilson's interval. Each stream is one cluster.

    To allow for the clusters, the interval is computed as if fewer questions had been asked (see :func:`ratio_variance`). If
    all answers are right or all are wrong, the interval is computed as if each stream had one question.
    """
    sums, sizes = _totals(clusters)
    units, asked = len(sums), float(sizes.sum())
    value = float(sums.sum()) / asked
    variance = ratio_variance(sums, sizes)
    effective = min(value * (1 - value) / variance, asked) if variance > 0 and 0 < value < 1 else float(units)
    spread = Z * np.sqrt(value * (1 - value) / effective + Z**2 / (4 * effective**2))
    middle, scale = value + Z**2 / (2 * effective), 1 + Z**2 / effective
    low, high = max(0.0, float((middle - spread) / scale)), min(1.0, float((middle + spread) / scale))
    return Estimate(value, min(low, value), max(high, value), units, int(asked))


def mean(clusters: Sequence[Values]) -> Estimate:
    """Return the mean of all values, with an interval of +- 1.96 standard errors."""
    sums, sizes = _totals(clusters)
    value = float(sums.sum() / sizes.sum())
    half = Z * float(np.sqrt(ratio_variance(sums, sizes)))
    return Estimate(value, value - half, value + half, len(sums), int(sizes.sum()))


def mean_difference(ours: Sequence[Values], theirs: Sequence[Values]) -> Estimate:
    """Return the mean of the paired differences ``ours - theirs``, with its interval.

    Raises ValueError unless ``ours`` and ``theirs`` have the same number of questions in each stream.
    """
    if [len(cluster) for cluster in ours] != [len(cluster) for cluster in theirs]:
        raise ValueError("ours and theirs must have the same number of questions in each stream")
    return mean([[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)])


def is_told_apart(ours: Sequence[Values], theirs: Sequence[Values]) -> bool:
    """Return whether the mean paired difference is significant (Student's t, 95 %); False for a single cluster."""
    found = mean_difference(ours, theirs)
    return abs(found.value) > half_width(found)


def half_width(found: Estimate) -> float:
    """Return half the width of Student's 95 % interval of a mean; infinity for a single cluster."""
    degrees = found.clusters - 1
    if degrees < 1:
        return math.inf
    quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else Z + (Z**3 + Z) / (4 * degrees)
    return (found.high - found.value) * quantile / Z


def difference(ours: Sequence[Cluster], theirs: Sequence[Cluster]) -> Estimate:
    """Return the difference between two fractions of right answers to the same questions, with an interval within [-1, 1]."""
    found = mean_difference(ours, theirs)
    return replace(found, low=max(-1.0, found.low), high=min(1.0, found.high))


def ratio_variance(sums: np.ndarray, sizes: np.ndarray) -> float:
    """Return the variance of ``sum(sums) / sum(sizes)`` over randomly drawn clusters, or 0 for a single cluster."""
    units = len(sums)
    if units < 2:
        return 0.0
    residual = sums - sums.sum() / sizes.sum() * sizes
    return float((residual**2).sum() * units / (units - 1) / sizes.sum() ** 2)


def _totals(clusters: Sequence[Values]) -> tuple[np.ndarray, np.ndarray]:
    """Return each stream's sum and number of values as float64 arrays, without streams that have no questions."""
    asked = [cluster for cluster in clusters if len(cluster)]
    return np.array([float(sum(c)) for c in asked]), np.array([float(len(c)) for c in asked])
