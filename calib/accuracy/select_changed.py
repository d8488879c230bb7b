"""Select what ``--append auto`` and ``--encode auto`` do: what saves most and surely loses little, both under full KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np

from edgevlm.calib.accuracy.compare import clusters, compare, correct_answers, of_kinds
from edgevlm.calib.accuracy.variants import FULL, Record
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.calib.intervals import Values, half_width, mean
from edgevlm.calib.trace import Float32
from edgevlm.errors import UserError
from edgevlm.progress import Report
from edgevlm.runtime.calibration import AppendChoice, AppendTrial, EncodeChoice, EncodeTrial, Measure
from edgevlm.runtime.changes import References, unit_features
from edgevlm.runtime.model import Model
from edgevlm.runtime.settings import ALL, AppendChanged, EncodeChanged

TAUS = (0.999, 0.99, 0.97, 0.95)  # of --append
REFRESH = 16  # frames, of the refresh whose cost is told
SETTINGS = (EncodeChanged(64, 12), EncodeChanged(64, 6), EncodeChanged(16, 6), EncodeChanged(4, 6))  # of --encode
BOUND: dict[Measure, float] = {"streamqa": 0.02, "kl": 0.05}  # loss at most
STREAMS = 4  # times as many as the policies are compared on: a small loss takes more to tell
SAVING = 0.1  # of tokens or patches at least: less is not worth the rows of the present

Trial = TypeVar("Trial", AppendTrial, EncodeTrial)


def append_label(tau: float) -> str:
    """Full KV under ``--append changed``, as a variant."""
    return f"{FULL}@{AppendChanged(tau)}"


def encode_label(setting: EncodeChanged) -> str:
    """Full KV under ``--encode changed``, as a variant."""
    return f"{FULL}@encode:{setting}"


def select_append(measure: Measure, trials: Sequence[tuple[AppendTrial, Sequence[Values]]]) -> AppendChoice:
    """The trial that appends least, of those that :func:`fitting` leaves. trials: each with its losses, cluster by cluster."""
    best = fitting(measure, trials, lambda trial: trial.appended)
    return AppendChoice(None if best is None else best.tau, BOUND[measure], tuple(trial for trial, _ in trials), REFRESH)


def select_encode(measure: Measure, trials: Sequence[tuple[EncodeTrial, Sequence[Values]]]) -> EncodeChoice:
    """The same of what is encoded."""
    best = fitting(measure, trials, lambda trial: trial.encoded)
    return EncodeChoice(None if best is None else best.setting, BOUND[measure], tuple(trial for trial, _ in trials))


def fitting(
    measure: Measure, trials: Sequence[tuple[Trial, Sequence[Values]]], taken: Callable[[Trial], float]
) -> Trial | None:
    """The trial that takes least, of those that save enough and whose loss surely stays within the measure's bound."""
    fit = [trial for trial, losses in trials if taken(trial) <= 1 - SAVING and surely_within(losses, BOUND[measure])]
    return min(fit, key=taken, default=None)


def surely_within(losses: Sequence[Values], bound: float) -> bool:
    """By Student's t, with one loss more than there were, so that a few answers without any prove nothing."""
    found = mean([[1.0, *losses[0]], *losses[1:]])
    return found.value + half_width(found) <= bound


def append_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Report
) -> AppendChoice:
    """Loss: of the answers about before that whole frames give right; those about now see the newest frame whole.

    streams: on which the policies were compared; STREAMS times as many are watched. What ``journal`` has already is not done
    again. Raises UserError.
    """

    def measured(*settings_of_append: AppendChanged) -> tuple[list[list[list[bool]]], list[list[Record]]]:
        """Of whole frames, then of each setting: what is right, and the records."""
        found = compare(
            settings, [], [], STREAMS * streams, out=journal, resume=True, model=model, progress=progress,
            append=(ALL, *map(str, settings_of_append)),
        )  # fmt: skip
        before = of_kinds({kind for kind, of in found.kinds().items() if of.value >= found.enters and not is_about_now(kind)})
        return [clusters(found.records[run], before) for run in found.runs], [found.records[run] for run in found.runs]

    (full, *right), (_, *records) = measured(*map(AppendChanged, TAUS))
    if not any(full):
        raise UserError("full KV answers too few of the demo world's questions about before")
    losses = [lost_answers(full, of_tau) for of_tau in right]
    choice = select_append("streamqa", [append_trial(*given) for given in zip(TAUS, records, losses, strict=True)])
    if choice.tau is None:
        return choice
    _, (_, refreshed) = measured(AppendChanged(choice.tau, REFRESH))
    return replace(choice, refreshed=round(fmean(record["appended"] for record in refreshed), 4))


def append_by_agreement(records: Sequence[Sequence[Record]]) -> AppendChoice:
    """Loss: of full KV's next tokens, those that are not the most probable. records: of each of TAUS, one a clip."""
    trials = [append_trial(tau, of_tau, lost_tokens(of_tau)) for tau, of_tau in zip(TAUS, records, strict=True)]
    choice = select_append("kl", trials)
    if choice.tau is None:
        return choice
    chosen = records[TAUS.index(choice.tau)]
    return replace(choice, refreshed=round(fmean(record["refreshed"] for record in chosen), 4))


def encode_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Report
) -> EncodeChoice:
    """Loss: of the answers that whole frames give right, about now too. What ``journal`` has already is not done again."""
    ways = (ALL, *map(str, SETTINGS))
    found = compare(settings, [], [], streams, out=journal, resume=True, model=model, progress=progress, encode=ways)
    full, *right = (correct_answers(found, run) for run in found.runs)
    losses, records = [lost_answers(full, of) for of in right], [found.records[run] for run in found.runs[1:]]
    return select_encode("streamqa", [encode_trial(*given) for given in zip(SETTINGS, records, losses, strict=True)])


def encode_by_agreement(records: Sequence[Sequence[Record]]) -> EncodeChoice:
    """Loss: of full KV's next tokens, those that are not the most probable. records: of each of SETTINGS, one a clip."""
    trials = [encode_trial(each, of, lost_tokens(of)) for each, of in zip(SETTINGS, records, strict=True)]
    return select_encode("kl", trials)


def append_trial(tau: float, records: Sequence[Record], losses: Sequence[Values]) -> tuple[AppendTrial, Sequence[Values]]:
    appended = round(fmean(record["appended"] for record in records), 4)
    return AppendTrial(tau, appended, *_estimate(losses)), losses


def encode_trial(
    setting: EncodeChanged, records: Sequence[Record], losses: Sequence[Values]
) -> tuple[EncodeTrial, Sequence[Values]]:
    encoded = round(fmean(record["encoded"] for record in records), 4)
    cosines = [record["low_cosine"] for record in records if "low_cosine" in record]
    return EncodeTrial(str(setting), encoded, *_estimate(losses), min(cosines, default=None)), losses


def _estimate(losses: Sequence[Values]) -> tuple[float, float, float]:
    found = mean(losses)
    return round(found.value, 6), round(found.low, 6), round(found.high, 6)


def lost_answers(full: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]) -> list[list[float]]:
    """Of each answer 1 where only whole frames have it right, -1 where only the other has; a list a stream."""
    return [[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in zip(full, other, strict=True)]


def lost_tokens(records: Sequence[Record]) -> list[list[float]]:
    """Of each next token 1 where it is not full KV's, a list a moment."""
    return [[1.0 - same for same in moment] for record in records for moment in record["top1"]]


def appended_fraction(features: Float32, settings: AppendChanged) -> float:
    """Of the tokens of frames ``[F, tokens, width]`` but the last, which is the present, the fraction that is appended."""
    references, count = References(settings, *features.shape[1:]), 0
    for frame in unit_features(features[:-1]):
        changed = references.changed(frame)
        references.appended(frame, changed, np.zeros(int(changed.sum()), np.int64))
        count += int(changed.sum())
    return count / max(1, features[:-1, :, 0].size)
