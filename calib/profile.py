"""Attention over age, and HERMES's layer classes measured from it (arXiv 2601.14724, sec. 3.1, Fig. 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.calibration import LayerClass

Float64 = NDArray[np.float64]

CLASSES: tuple[LayerClass, ...] = ("shallow", "middle", "deep")
DOMINATED = 0.5  # of the attention on the newest tenth of the frames: more makes a layer shallow
FLAT = 2.0  # times what even attention would leave there: no more may be left in a deep layer
PERIODIC = 0.5  # autocorrelation at the lag of one frame: a deep layer has at least that
PAPER = (0.1, 0.7)  # HERMES's own depths: shallow below the first, deep from the second


def ages(attention: Float64, frames: int) -> Float64:
    """Share of a layer's attention to vision ``[n]``, in stream order, that goes to each frame: ``[frames]``, newest first."""
    mass = attention.reshape(frames, -1).sum(1)[::-1]
    return mass / max(mass.sum(), 1e-300)


def newest_tenth(frames: int) -> int:
    """Frames in the newest tenth, at least one."""
    return max(1, round(frames / 10))


def recency(age: Float64) -> float:
    """The share of the newest tenth of the frames: tenth / frames where attention is even, 1 where it is all there."""
    return float(age[: newest_tenth(len(age))].sum())


def periodicity(attention: Float64, frames: int) -> float:
    """Autocorrelation of log attention ``[n]`` at lag p = n / frames, its trend taken out: 1 for one pattern in all frames.

    The trend is a centred moving mean over one frame (for even p over p + 1 tokens with half weight at both ends), so that
    decay with age, however steep, is no pattern. 0 for attention without any.
    """
    period = len(attention) // frames
    if period < 2:
        return 0.0
    level = np.log(np.maximum(attention, 1e-30))
    window = np.ones(period) if period % 2 else np.r_[0.5, np.ones(period - 1), 0.5]
    half = len(window) // 2
    rest = level[half : len(level) - half] - np.convolve(level, window / period, "valid")
    earlier, later = rest[:-period], rest[period:]
    if min(earlier.std(), later.std()) < 1e-9:
        return 0.0
    return float(np.corrcoef(earlier, later)[0, 1])


def classify(recent: float, flat: float, periodic: float) -> LayerClass:
    """Shallow: more than half of the attention is on the newest tenth of the frames. Deep: at most twice its even share
    (``flat``) is there, and the pattern of one frame repeats in the next. Middle: what is between.
    """
    if recent > DOMINATED:
        return "shallow"
    return "deep" if recent <= FLAT * flat and periodic >= PERIODIC else "middle"


def boundaries(classes: Sequence[LayerClass]) -> tuple[int, int]:
    """The depths (middle_from, deep_from) whose shallow, middle and deep layers differ least from ``classes``.

    The difference counts classes (shallow for deep is two), summed over layers; of equal ones the pair next to HERMES's
    depths, .1 L and .7 L, is taken.
    """
    layers = len(classes)
    ranks = np.array([CLASSES.index(name) for name in classes])
    depth = np.arange(layers)
    paper = [math.floor(share * layers + 1e-9) for share in PAPER]

    def cost(pair: tuple[int, int]) -> tuple[int, int]:
        fitted = (depth >= pair[0]).astype(int) + (depth >= pair[1])
        return int(np.abs(ranks - fitted).sum()), abs(pair[0] - paper[0]) + abs(pair[1] - paper[1])

    return min(combinations_with_replacement(range(layers + 1), 2), key=cost)
