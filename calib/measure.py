"""From clips to a calibration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from itertools import zip_longest

import numpy as np

from edgevlm import __version__
from edgevlm.calib import profile
from edgevlm.calib.agreement import agreement, best_candidate
from edgevlm.calib.observe import Clip, Float64, Observation, Observer
from edgevlm.calib.values import thresholds
from edgevlm.runtime.bundle import Bundle, Progress
from edgevlm.runtime.calibration import Calibration
from edgevlm.runtime.kv import KVScales
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies.infinipot_v import variation


def calibrate(model: Model, clips: Sequence[Clip], frames: int | None = None, progress: Progress | None = None) -> Calibration:
    """Watch each clip under full KV and measure every layer; what is measured a clip is averaged over clips.

    frames: of each clip; None takes as many as the model's positions hold, 6,000 tokens at most. Raises UserError for clips too
    short, and for frames that cannot be held.
    """
    questions = tuple(dict.fromkeys(question for clip in clips for question in clip.questions))
    observer = Observer(model, frames, questions)
    observations = []
    for number, clip in enumerate(clips, 1):
        if progress is not None:
            progress(f"watching {clip.name} ({number} of {len(clips)})")
        observations.append(observer(clip))
    return summarise(observations, tuple(clip.name for clip in clips), questions)


def summarise(observations: Sequence[Observation], clips: tuple[str, ...], questions: tuple[str, ...]) -> Calibration:
    """The calibration that observations of the same model amount to."""
    layers = range(len(observations[0].norms))
    cv = [_mean(variation(seen.norms[layer]) for seen in observations) for layer in layers]
    ages = [[profile.ages(seen.attention[layer], seen.frames) for seen in observations] for layer in layers]
    recency = [_mean(map(profile.recency, of_layer)) for of_layer in ages]
    flat = _mean(profile.newest_tenth(seen.frames) / seen.frames for seen in observations)
    periodicity = [_mean(profile.periodicity(seen.attention[layer], seen.frames) for seen in observations) for layer in layers]
    classes = tuple(profile.classify(recent, flat, periodic) for recent, periodic in zip(recency, periodicity, strict=True))
    middle_from, deep_from = profile.boundaries(classes)
    tables = [agreement(seen.mass, seen.norms) for seen in observations]
    table = [[_agreed(cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
    return Calibration(
        edgevlm=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        clips=clips,
        frames=tuple(seen.frames for seen in observations),
        questions=questions,
        cv=_rounded(cv),
        thresholds=thresholds(cv),
        ages=tuple(_rounded(_over_clips(of_layer)) for of_layer in ages),
        recency=_rounded(recency),
        flat=round(flat, 6),
        periodicity=_rounded(periodicity),
        classes=classes,
        middle_from=middle_from,
        deep_from=deep_from,
        agreement=tuple(map(tuple, table)),
        clie=best_candidate(table),
    )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _agreed(cells: Sequence[float | None]) -> float | None:
    return None if cells[0] is None else round(_mean(cell for cell in cells if cell is not None), 6)


def _over_clips(shares: Sequence[Float64]) -> list[float]:
    """The mean share of each age ``[longest clip]``, over the clips that are as long, normalised."""
    means = [_mean(share for share in of_age if share is not None) for of_age in zip_longest(*shares)]
    return [mean / sum(means) for mean in means]


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBundle(Bundle):
    """A bundle as it will be once what was measured has been written. None: what it has stays."""

    measured: Calibration | None
    scales: KVScales | None

    def calibration(self) -> Calibration | None:
        return self.measured or Bundle.calibration(self)

    def kv_scales(self) -> KVScales | None:
        return self.scales or Bundle.kv_scales(self)


def as_calibrated(model: Model, calibration: Calibration | None, scales: KVScales | None = None) -> Model:
    """The model, on whose sessions policies run on this calibration and int8 caches on these scales; it shares the engine."""
    parts = {field.name: getattr(model.bundle, field.name) for field in fields(Bundle)}
    return replace(model, bundle=MeasuredBundle(**parts, measured=calibration, scales=scales))
