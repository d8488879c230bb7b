"""Select the tau of ``--append auto``: the one that saves most tokens and surely loses little, both under full KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from edgevlm.calib.accuracy.compare import Progress, clusters, compare, of_kinds
from edgevlm.calib.accuracy.journal import Record
from edgevlm.calib.accuracy.variants import FULL
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.calib.intervals import Values, half_width, mean
from edgevlm.calib.trace import Float32
from edgevlm.errors import UserError
from edgevlm.runtime.calibration import AppendChoice, AppendTrial, Measure
from edgevlm.runtime.changes import ALL, AppendChanged, References, unit_features
from edgevlm.runtime.model import Model

TAUS = (0.999, 0.99, 0.97, 0.95)
REFRESH = 16  # frames, of the refresh whose cost is told
BOUND: dict[Measure, float] = {"streamqa": 0.02, "kl": 0.05}  # loss at most
STREAMS = 4  # times as many as the policies are compared on: a small loss takes more to tell
SAVING = 0.1  # of the tokens at least: less is not worth the rows of the present


def label_of(tau: float, refresh: int = 0) -> str:
    """Full KV under ``changed``, as a variant."""
    return f"{FULL}@{AppendChanged(tau, refresh)}"


def select_append(measure: Measure, trials: Sequence[tuple[AppendTrial, Sequence[Values]]]) -> AppendChoice:
    """The trial that appends least, of those that save enough and whose loss surely stays within the measure's bound.

    trials: each with its losses, cluster by cluster.
    """
    fit = [trial for trial, losses in trials if trial.appended <= 1 - SAVING and surely_within(losses, BOUND[measure])]
    best = min(fit, key=lambda trial: trial.appended, default=None)
    return AppendChoice(None if best is None else best.tau, BOUND[measure], tuple(trial for trial, _ in trials), REFRESH)


def surely_within(losses: Sequence[Values], bound: float) -> bool:
    """By Student's t, with one loss more than there were, so that a few answers without any prove nothing."""
    found = mean([[1.0, *losses[0]], *losses[1:]])
    return found.value + half_width(found) <= bound


def make_trial(tau: float, records: Sequence[Record], losses: Sequence[Values]) -> tuple[AppendTrial, Sequence[Values]]:
    """A trial from its records, one a stream, and its losses."""
    found, appended = mean(losses), round(fmean(record["appended"] for record in records), 4)
    loss, low, high = (round(number, 6) for number in (found.value, found.low, found.high))
    return AppendTrial(tau, appended, loss, low, high), losses


def append_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Progress
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

    (whole, *right), (_, *records) = measured(*map(AppendChanged, TAUS))
    if not any(whole):
        raise UserError("full KV answers too few of the demo world's questions about before")
    losses = [
        [[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in zip(whole, of_tau, strict=True)]
        for of_tau in right
    ]
    trials = [make_trial(*given) for given in zip(TAUS, records, losses, strict=True)]
    choice = select_append("streamqa", trials)
    if choice.tau is None:
        return choice
    _, (_, refreshed) = measured(AppendChanged(choice.tau, REFRESH))
    return replace(choice, refreshed=round(fmean(record["appended"] for record in refreshed), 4))


def append_by_agreement(records: Sequence[Sequence[Record]]) -> AppendChoice:
    """Loss: of full KV's next tokens, those that are not the most probable. records: of each of TAUS, a list a clip."""
    losses = [[[1.0 - same for same in moment] for record in of_tau for moment in record["top1"]] for of_tau in records]
    choice = select_append("kl", [make_trial(*given) for given in zip(TAUS, records, losses, strict=True)])
    if choice.tau is None:
        return choice
    chosen = records[TAUS.index(choice.tau)]
    return replace(choice, refreshed=round(fmean(record["refreshed"] for record in chosen), 4))


def appended_fraction(features: Float32, settings: AppendChanged) -> float:
    """Of the tokens of frames ``[F, tokens, width]`` but the last, which is the present, the fraction that is appended."""
    references, count = References(settings, *features.shape[1:]), 0
    for frame in unit_features(features[:-1]):
        changed = references.changed(frame)
        references.appended(frame, changed, np.zeros(int(changed.sum()), np.int64))
        count += int(changed.sum())
    return count / max(1, features[:-1, :, 0].size)
