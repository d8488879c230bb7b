"""Select what ``--append auto`` and ``--encode auto`` do: what saves most and surely loses little, both under full KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np

from edgevlm.calib.accuracy.compare import ENTERS, clusters, compare, correct_answers, of_kinds
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
REFRESH = 16  # frames: the refresh whose cost is reported
SETTINGS = (EncodeChanged(64, 12), EncodeChanged(64, 6), EncodeChanged(16, 6), EncodeChanged(4, 6))  # of --encode
BOUND: dict[Measure, float] = {"streamqa": 0.02, "kl": 0.05}  # the largest loss
STREAMS = 4  # times as many as the policies are compared on: a small loss takes more to show
SAVING = 0.1  # of tokens or patches at least: less is not worth the rows of the present

Trial = TypeVar("Trial", AppendTrial, EncodeTrial)


def append_label(tau: float) -> str:
    """The variant of full KV under ``--append changed``."""
    return f"{FULL}@{AppendChanged(tau)}"


def encode_label(setting: EncodeChanged) -> str:
    """The variant of full KV under ``--encode changed``."""
    return f"{FULL}@encode:{setting}"


def best_trial(measure: Measure, trials: Sequence[Trial], losses: Sequence[Sequence[Values]], taken: str) -> Trial | None:
    """The trial with the smallest ``taken`` (appended or encoded) of those that save enough and surely lose little.

    losses: of each trial, cluster by cluster.
    """
    fit = [
        (getattr(trial, taken), trial)
        for trial, lost in zip(trials, losses, strict=True)
        if getattr(trial, taken) <= 1 - SAVING and surely_within(lost, BOUND[measure])
    ]
    return min(fit, key=lambda pair: pair[0])[1] if fit else None


def surely_within(losses: Sequence[Values], bound: float) -> bool:
    """Whether the mean loss stays within ``bound`` by Student's t; one loss is added, so that a few answers prove nothing."""
    found = mean([[1.0, *losses[0]], *losses[1:]])
    return found.value + half_width(found) <= bound


def append_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Report
) -> AppendChoice:
    """Choose by the loss of right answers about before; those about now see the newest frame whole.

    streams: the number that the policies were compared on; STREAMS times as many are watched. Raises UserError.
    """

    def measured(*changed: AppendChanged) -> tuple[list[list[list[bool]]], list[list[Record]]]:
        """The right answers and the records of whole frames, then of each setting."""
        ways = (ALL, *map(str, changed))
        found = compare(
            settings, [], [], STREAMS * streams, out=journal, resume=True, model=model, progress=progress, append=ways
        )
        before = of_kinds({kind for kind, of in found.kinds().items() if of.value >= ENTERS and not is_about_now(kind)})
        return [clusters(found.records[run], before) for run in found.runs], [found.records[run] for run in found.runs]

    (full, *right), (_, *records) = measured(*map(AppendChanged, TAUS))
    if not any(full):
        raise UserError("full KV answers too few of the demo world's questions about before")
    choice = _append_choice("streamqa", records, [lost_answers(full, of_tau) for of_tau in right])
    if choice.tau is None:
        return choice
    _, (_, refreshed) = measured(AppendChanged(choice.tau, REFRESH))
    return replace(choice, refreshed=round(fmean(record["appended"] for record in refreshed), 4))


def append_by_agreement(records: Sequence[Sequence[Record]]) -> AppendChoice:
    """Choose by the next tokens that are not full KV's. records: of each of TAUS, one a clip."""
    choice = _append_choice("kl", records, list(map(lost_tokens, records)))
    if choice.tau is None:
        return choice
    chosen = records[TAUS.index(choice.tau)]
    return replace(choice, refreshed=round(fmean(record["refreshed"] for record in chosen), 4))


def encode_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Report
) -> EncodeChoice:
    """Choose by the loss of right answers, about now too."""
    ways = (ALL, *map(str, SETTINGS))
    found = compare(settings, [], [], streams, out=journal, resume=True, model=model, progress=progress, encode=ways)
    full, *right = (correct_answers(found, run) for run in found.runs)
    return _encode_choice("streamqa", [found.records[run] for run in found.runs[1:]], [lost_answers(full, of) for of in right])


def encode_by_agreement(records: Sequence[Sequence[Record]]) -> EncodeChoice:
    """Choose by the next tokens that are not full KV's. records: of each of SETTINGS, one a clip."""
    return _encode_choice("kl", records, list(map(lost_tokens, records)))


def _append_choice(measure: Measure, records: Sequence[Sequence[Record]], losses: Sequence[Sequence[Values]]) -> AppendChoice:
    trials = tuple(
        AppendTrial(tau, _mean_of("appended", of_tau), *_estimate(lost))
        for tau, of_tau, lost in zip(TAUS, records, losses, strict=True)
    )
    best = best_trial(measure, trials, losses, "appended")
    return AppendChoice(best.tau if best else None, BOUND[measure], trials, REFRESH)


def _encode_choice(measure: Measure, records: Sequence[Sequence[Record]], losses: Sequence[Sequence[Values]]) -> EncodeChoice:
    trials = []
    for setting, of_setting, lost in zip(SETTINGS, records, losses, strict=True):
        cosine = min((record["low_cosine"] for record in of_setting if "low_cosine" in record), default=None)
        trials.append(EncodeTrial(str(setting), _mean_of("encoded", of_setting), *_estimate(lost), cosine))
    best = best_trial(measure, trials, losses, "encoded")
    return EncodeChoice(best.setting if best else None, BOUND[measure], tuple(trials))


def _mean_of(name: str, records: Sequence[Record]) -> float:
    return round(fmean(record[name] for record in records), 4)


def _estimate(losses: Sequence[Values]) -> tuple[float, float, float]:
    found = mean(losses)
    return round(found.value, 6), round(found.low, 6), round(found.high, 6)


def lost_answers(full: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]) -> list[list[float]]:
    """For each answer 1 where only whole frames have it right, -1 where only the other has; a list a stream."""
    return [[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in zip(full, other, strict=True)]


def lost_tokens(records: Sequence[Record]) -> list[list[float]]:
    """For each next token 1 where it is not full KV's, a list a moment."""
    return [[1.0 - same for same in moment] for record in records for moment in record["top1"]]


def appended_fraction(features: Float32, settings: AppendChanged) -> float:
    """The fraction of the tokens of frames ``[F, tokens, width]`` but the last, which is the present, that is appended."""
    references, count = References(settings, *features.shape[1:]), 0
    for frame in unit_features(features[:-1]):
        changed = references.changed(frame)
        references.appended(frame, changed, np.zeros(int(changed.sum()), np.int64))
        count += int(changed.sum())
    return count / max(1, features[:-1, :, 0].size)
