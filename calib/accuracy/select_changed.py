"""Select what ``--append auto`` and ``--encode auto`` do: what saves most and surely loses little, both under full KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from edgevlm.calib.accuracy.compare import clusters, compare, of_kinds
from edgevlm.calib.accuracy.variants import FULL, Record
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.calib.intervals import Values, half_width, mean
from edgevlm.errors import UserError
from edgevlm.progress import Report
from edgevlm.runtime.calibration import AppendChoice, AppendTrial, EncodeChoice, EncodeTrial, Measure
from edgevlm.runtime.model import Model
from edgevlm.runtime.settings import ALL, AppendChanged, EncodeChanged

TAUS = (0.999, 0.99, 0.97, 0.95)  # of --append
SETTINGS = (EncodeChanged(64, 12), EncodeChanged(64, 6), EncodeChanged(16, 6), EncodeChanged(4, 6))  # of --encode
BOUND: dict[Measure, float] = {"streamqa": 0.02, "kl": 0.05}  # the largest loss
STREAMS = 4  # times as many as the policies are compared on: a small loss takes more to show
SAVING = 0.1  # of tokens or patches at least: less is not worth the rows of the present

Trial = TypeVar("Trial", AppendTrial, EncodeTrial)
Records = Sequence[Sequence[Record]]  # of each setting, one a stream or clip
Losses = Sequence[Sequence[Values]]  # of each setting, cluster by cluster


def append_label(tau: float) -> str:
    """The variant of full KV under ``--append changed``."""
    return f"{FULL}@{AppendChanged(tau)}"


def encode_label(setting: EncodeChanged) -> str:
    """The variant of full KV under ``--encode changed``."""
    return f"{FULL}@encode:{setting}"


def best_trial(measure: Measure, trials: Sequence[Trial], losses: Losses, taken: str) -> Trial | None:
    """The trial with the smallest ``taken`` (appended or encoded) of those that save enough and surely lose little."""
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
    ways = (ALL, *(str(AppendChanged(tau)) for tau in TAUS))
    found = _by_questions(settings, STREAMS * streams, journal, model, progress, append=ways, now=False)
    return _append_choice("streamqa", *found)


def append_by_agreement(records: Records) -> AppendChoice:
    """Choose by the next tokens that are not full KV's. records: of each of TAUS, one a clip."""
    return _append_choice("kl", records, list(map(lost_tokens, records)))


def encode_by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Report
) -> EncodeChoice:
    """Choose by the loss of right answers, about now too."""
    ways = (ALL, *map(str, SETTINGS))
    return _encode_choice("streamqa", *_by_questions(settings, streams, journal, model, progress, encode=ways))


def encode_by_agreement(records: Records) -> EncodeChoice:
    """Choose by the next tokens that are not full KV's. records: of each of SETTINGS, one a clip."""
    return _encode_choice("kl", records, list(map(lost_tokens, records)))


def _by_questions(
    settings: AccuracySettings, streams: int, journal: Path, model: Model, progress: Report,
    append: Sequence[str] = (ALL,), encode: Sequence[str] = (ALL,), now: bool = True,
) -> tuple[Records, Losses]:  # fmt: skip
    """Return the records of each setting after the first, whole frames, and for each answer what it loses to these.

    A loss is 1 where only whole frames have the answer right, -1 where only the setting has. now: count answers about now too.
    """
    found = compare(
        settings, [], [], streams, out=journal, resume=True, model=model, progress=progress, append=append, encode=encode
    )
    kinds = {kind for kind, of in found.kinds().items() if of.value >= found.enters and (now or not is_about_now(kind))}
    full, *right = (clusters(found.records[run], of_kinds(kinds)) for run in found.runs)
    if not any(full):
        raise UserError("full KV answers too few of the demo world's questions")
    losses = [
        [[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in zip(full, of, strict=True)] for of in right
    ]
    return [found.records[run] for run in found.runs[1:]], losses


def _append_choice(measure: Measure, records: Records, losses: Losses) -> AppendChoice:
    trials = tuple(
        AppendTrial(tau, _mean_of("appended", of_tau), *_estimate(lost))
        for tau, of_tau, lost in zip(TAUS, records, losses, strict=True)
    )
    best = best_trial(measure, trials, losses, "appended")
    return AppendChoice(best.tau if best else None, BOUND[measure], trials)


def _encode_choice(measure: Measure, records: Records, losses: Losses) -> EncodeChoice:
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


def lost_tokens(records: Sequence[Record]) -> list[list[float]]:
    """For each next token 1 where it is not full KV's, a list a moment."""
    return [[1.0 - same for same in moment] for record in records for moment in record["top1"]]
