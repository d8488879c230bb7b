"""Select the interval and threshold of ``--encode auto``: they save most of the tower and surely lose little, under full KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from edgevlm.calib.accuracy.compare import Progress, compare, correct_answers
from edgevlm.calib.accuracy.journal import Record
from edgevlm.calib.accuracy.select_append import BOUND, SAVING, surely_within
from edgevlm.calib.accuracy.variants import FULL
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.calib.intervals import Values, mean
from edgevlm.runtime.calibration import EncodeChoice, EncodeTrial, Measure
from edgevlm.runtime.changed_patches import EncodeChanged
from edgevlm.runtime.changes import ALL
from edgevlm.runtime.model import Model

SETTINGS = (EncodeChanged(64, 12), EncodeChanged(64, 6), EncodeChanged(16, 6), EncodeChanged(4, 6))


def label_of(setting: EncodeChanged) -> str:
    """Full KV under it, as a variant."""
    return f"{FULL}@encode:{setting}"


def select_encode(
    measure: Measure, records: Mapping[EncodeChanged, Sequence[Record]], losses: Mapping[EncodeChanged, Sequence[Values]]
) -> EncodeChoice:
    """The setting that encodes least, of those that save enough and whose loss surely stays within the measure's bound.

    records: of each setting, one a stream; losses: cluster by cluster.
    """
    trials = [make_trial(setting, records[setting], losses[setting]) for setting in records]
    pairs = zip(trials, losses.values(), strict=True)
    fit = [trial for trial, lost in pairs if trial.encoded <= 1 - SAVING and surely_within(lost, BOUND[measure])]
    best = min(fit, key=lambda trial: trial.encoded, default=None)
    return EncodeChoice(None if best is None else best.setting, BOUND[measure], tuple(trials))


def make_trial(setting: EncodeChanged, records: Sequence[Record], losses: Sequence[Values]) -> EncodeTrial:
    """A trial from its records, one a stream, and its losses."""
    found, encoded = mean(losses), round(fmean(record["encoded"] for record in records), 4)
    cosines = [record["low_cosine"] for record in records if "low_cosine" in record]
    loss, low, high = (round(number, 6) for number in (found.value, found.low, found.high))
    return EncodeTrial(str(setting), encoded, loss, low, high, min(cosines, default=None))


def encode_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Progress
) -> EncodeChoice:
    """Loss: of the answers that whole frames give right, about now too. What ``journal`` has already is not done again."""
    ways = (ALL, *map(str, SETTINGS))
    found = compare(settings, [], [], streams, out=journal, resume=True, model=model, progress=progress, encode=ways)
    whole, *right = (correct_answers(found, run) for run in found.runs)
    losses = {
        setting: [[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in zip(whole, of_setting, strict=True)]
        for setting, of_setting in zip(SETTINGS, right, strict=True)
    }
    return select_encode("streamqa", dict(zip(SETTINGS, map(found.records.__getitem__, found.runs[1:]), strict=True)), losses)


def encode_by_agreement(records: Mapping[EncodeChanged, Sequence[Record]]) -> EncodeChoice:
    """Loss: of full KV's next tokens, those that are not the most probable. records: of each setting, one a clip."""
    losses = {
        setting: [[1.0 - same for same in moment] for record in of_setting for moment in record["top1"]]
        for setting, of_setting in records.items()
    }
    return select_encode("kl", records, losses)
