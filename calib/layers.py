"""Measure a model's layers: value norms, attention over token age, and how well layers agree on which tokens matter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import combinations_with_replacement, zip_longest

import numpy as np
from numpy.typing import NDArray

from edgevlm import __version__
from edgevlm.calib.trace import Clip, ClipTrace, ClipTracer, Float64
from edgevlm.progress import Notify
from edgevlm.runtime.calibration import Calibration, LayerClass
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies.infinipot_v import WINDOWS, variation

CLASSES: tuple[LayerClass, ...] = ("shallow", "middle", "deep")
DOMINATED = 0.5
FLAT = 2.0
PERIODIC = 0.5  # a deep layer's attention has at least this autocorrelation at a lag of one frame
PAPER = (0.1, 0.7)
CANDIDATES = 6  # the number of lowest layers tried as PureKV's CLIE layer


def calibrate(model: Model, clips: Sequence[Clip], frames: int | None = None, progress: Notify | None = None) -> Calibration:
    """Watch each clip under full KV and measure every layer, averaging over the clips.

    ``frames``: how many frames of each clip to watch; by default, as many as the model has positions for, up to 6,000 tokens.
    Raises UserError if a clip is too short, or if full KV cannot hold its frames.
    """
    questions = tuple(dict.fromkeys(question for clip in clips for question in clip.questions))
    tracer = ClipTracer(model, frames, questions)
    traces = []
    for number, clip in enumerate(clips, 1):
        if progress is not None:
            progress(f"watching {clip.name} ({number} of {len(clips)})")
        traces.append(tracer(clip))
    return summarise(traces, tuple(clip.name for clip in clips), questions)


def summarise(traces: Sequence[ClipTrace], clips: tuple[str, ...], questions: tuple[str, ...]) -> Calibration:
    """Combine the measurements of several clips into one calibration."""
    layers = range(len(traces[0].norms))
    cv = [_mean(variation(seen.norms[layer]) for seen in traces) for layer in layers]
    age_fractions = [[ages(seen.attention[layer], seen.frames) for seen in traces] for layer in layers]
    recent_fractions = [_mean(map(recency, of_layer)) for of_layer in age_fractions]
    flat = _mean(newest_tenth(seen.frames) / seen.frames for seen in traces)
    periods = [_mean(periodicity(seen.attention[layer], seen.frames) for seen in traces) for layer in layers]
    classes = tuple(classify(recent, flat, periodic) for recent, periodic in zip(recent_fractions, periods, strict=True))
    middle_from, deep_from = boundaries(classes)
    tables = [layer_rank_correlation(seen.mass, seen.norms) for seen in traces]
    table = [[_mean_of_known(cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
    return Calibration(
        edgevlm=__version__, date=datetime.now(timezone.utc).isoformat(timespec="seconds"), clips=clips,
        frames=tuple(seen.frames for seen in traces), questions=questions, cv=_rounded(cv), thresholds=thresholds(cv),
        ages=tuple(_rounded(_over_clips(of_layer)) for of_layer in age_fractions), recency=_rounded(recent_fractions),
        flat=round(flat, 6), periodicity=_rounded(periods), classes=classes, middle_from=middle_from, deep_from=deep_from,
        agreement=tuple(map(tuple, table)), clie=best_clie_layer(table),
    )  # fmt: skip


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _mean_of_known(cells: Sequence[float | None]) -> float | None:
    return None if cells[0] is None else round(_mean(cell for cell in cells if cell is not None), 6)


def _over_clips(fractions: Sequence[Float64]) -> list[float]:
    """Average the clips' attention by age, and scale the result to a sum of 1. Shape ``[frames of the longest clip]``."""
    means = [_mean(fraction for fraction in of_age if fraction is not None) for of_age in zip_longest(*fractions)]
    return [mean / sum(means) for mean in means]


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values)


def ages(attention: Float64, frames: int) -> Float64:
    """Return the fraction of the attention that each frame gets, newest first.

    ``attention``: the attention to each token, ``[n]``. The result is ``[frames]``.
    """
    mass = attention.reshape(frames, -1).sum(1)[::-1]
    return mass / max(mass.sum(), 1e-300)


def newest_tenth(frames: int) -> int:
    return max(1, round(frames / 10))


def recency(age: Float64) -> float:
    """Return the fraction of the attention that goes to the newest tenth of the frames."""
    return float(age[: newest_tenth(len(age))].sum())


def periodicity(attention: Float64, frames: int) -> float:
    """Return how similar the attention pattern is from frame to frame.

    This is the autocorrelation of ``attention [n]`` at a lag of one frame (n / frames tokens). It is 1 if the pattern is the
    same in all frames, and 0 if there is no pattern. First, a moving mean over one frame is subtracted from the logarithm of
    the attention, so that decay with age does not count.
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
    """Classify a layer by how much of its attention goes to recent frames.

    ``recent``: the fraction of the attention on the newest tenth of the frames. A layer is ``shallow`` if ``recent`` is above
    one half. A layer is ``deep`` if attention repeats from frame to frame and ``recent`` is at most twice ``flat``, the value
    of ``recent`` under uniform attention. All other layers are ``middle``.
    """
    if recent > DOMINATED:
        return "shallow"
    return "deep" if recent <= FLAT * flat and periodic >= PERIODIC else "middle"


def boundaries(classes: Sequence[LayerClass]) -> tuple[int, int]:
    """Return the first middle layer and the first deep layer.

    The two are chosen so that the shallow, middle and deep layers best match ``classes``. A shallow layer where a deep one is
    expected, or the reverse, counts as two errors. If several pairs match equally well, the pair closest to HERMES's default
    depths is returned.
    """
    layers = len(classes)
    ranks = np.array([CLASSES.index(name) for name in classes])
    depth = np.arange(layers)
    paper = [math.floor(fraction * layers + 1e-9) for fraction in PAPER]

    def cost(pair: tuple[int, int]) -> tuple[int, int]:
        fitted = (depth >= pair[0]).astype(int) + (depth >= pair[1])
        return int(np.abs(ranks - fitted).sum()), abs(pair[0] - paper[0]) + abs(pair[1] - paper[1])

    return min(combinations_with_replacement(range(layers + 1), 2), key=cost)


def thresholds(cv: Sequence[float]) -> tuple[float, float, float]:
    """Return tau1 < tau2 < tau3, which split the layers into quarters by the coefficient of variation of their value norms.

    The quarter of the layers whose norms vary least gets a window of 7, the next quarters get 5, 3 and 1. Each tau is half way
    between two coefficients. With fewer than 4 layers, or with equal coefficients, some windows are not used.
    """
    ordered = np.sort(np.asarray(cv, np.float64))
    borders: list[float] = []
    for quarter in range(1, len(WINDOWS)):
        rank = min(math.ceil(quarter * len(ordered) / len(WINDOWS)), len(ordered) - 1)
        middle = float(ordered[max(rank - 1, 0)] + ordered[rank]) / 2
        borders.append(max(middle, math.nextafter(borders[-1], math.inf)) if borders else middle)
    return borders[0], borders[1], borders[2]


def spearman(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation of two arrays ``[n]``. Tied values get their mean rank; a constant array gives 0."""
    ranks = []
    for values in (a, b):
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[place])
    return 0.0 if min(map(np.std, ranks)) == 0 else float(np.corrcoef(*ranks)[0, 1])


def layer_rank_correlation(
    mass: Sequence[NDArray[np.floating]], norms: Sequence[NDArray[np.floating]]
) -> list[list[float | None]]:
    """Correlate ``S^c ||V^l||`` (PureKV's eq. 4) and ``S^l ||V^l||`` (eq. 3) for each candidate c and layer l above c.

    ``mass``: each layer's attention mass S, ``[kv_heads, n]``. ``norms``: each layer's value norms ||V||.
    """
    layers, (heads, n) = len(mass), mass[0].shape
    norms = [of_layer[:, :n] for of_layer in norms]

    def correlation(c: int, layer: int) -> float:
        return _mean(spearman(mass[c][h] * norms[layer][h], mass[layer][h] * norms[layer][h]) for h in range(heads))

    candidates = range(max(1, min(CANDIDATES, layers - 1)))
    return [[correlation(c, layer) if layer > c else None for layer in range(layers)] for c in candidates]


def best_clie_layer(table: Sequence[Sequence[float | None]]) -> int:
    """Return the candidate layer whose scores correlate best with those of the layers above the last candidate."""
    return int(np.argmax([np.mean([row[layer] or 0.0 for layer in range(len(table), len(row))] or [0.0]) for row in table]))
