"""Select what ``--append auto`` and ``--encode auto`` do: what saves most and surely loses little, both under full KV."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

from edgevlm.calib.accuracy.variants import FULL, Record
from edgevlm.calib.intervals import Values, half_width, mean
from edgevlm.runtime.calibration import AppendChoice, AppendTrial, EncodeChoice, EncodeTrial
from edgevlm.runtime.settings import AppendChanged, EncodeChanged

TAUS = (0.999, 0.99, 0.97, 0.95)  # of --append
SETTINGS = (EncodeChanged(64, 12), EncodeChanged(64, 6), EncodeChanged(16, 6), EncodeChanged(4, 6))  # of --encode
BOUND = 0.05  # the largest loss, of next tokens that are not full KV's
SAVING = 0.1  # of tokens or patches at least: less is not worth the rows of the present

Trial = TypeVar("Trial", AppendTrial, EncodeTrial)


def append_label(tau: float) -> str:
    """The variant of full KV under ``--append changed``."""
    return f"{FULL}@{AppendChanged(tau)}"


def encode_label(setting: EncodeChanged) -> str:
    """The variant of full KV under ``--encode changed``."""
    return f"{FULL}@encode:{setting}"


def best_trial(trials: Sequence[Trial], losses: Sequence[Sequence[Values]], taken: str) -> Trial | None:
    """The trial with the smallest ``taken`` (appended or encoded) of those that save enough and surely lose little.

    losses: of each trial, cluster by cluster.
    """
    fit = [
        (getattr(trial, taken), trial)
        for trial, lost in zip(trials, losses, strict=True)
        if getattr(trial, taken) <= 1 - SAVING and surely_within(lost, BOUND)
    ]
    return min(fit, key=lambda pair: pair[0])[1] if fit else None


def surely_within(losses: Sequence[Values], bound: float) -> bool:
    """Whether the mean loss stays within ``bound`` by Student's t; one loss is added, so that a few answers prove nothing."""
    found = mean([[1.0, *losses[0]], *losses[1:]])
    return found.value + half_width(found) <= bound


def select_append(records: Sequence[Sequence[Record]]) -> AppendChoice:
    """records: of each of TAUS, one a clip."""
    losses, trials = [lost_tokens(of_tau) for of_tau in records], []
    for tau, of_tau, lost in zip(TAUS, records, losses, strict=True):
        trials.append(AppendTrial(tau, _mean_of("appended", of_tau), *_estimate(lost)))
    best = best_trial(trials, losses, "appended")
    return AppendChoice(best.tau if best else None, BOUND, tuple(trials))


def select_encode(records: Sequence[Sequence[Record]]) -> EncodeChoice:
    """records: of each of SETTINGS, one a clip."""
    losses, trials = [lost_tokens(of_setting) for of_setting in records], []
    for setting, of_setting, lost in zip(SETTINGS, records, losses, strict=True):
        cosine = min(record["low_cosine"] for record in of_setting)
        trials.append(EncodeTrial(str(setting), _mean_of("encoded", of_setting), *_estimate(lost), cosine))
    best = best_trial(trials, losses, "encoded")
    return EncodeChoice(best.setting if best else None, BOUND, tuple(trials))


def _mean_of(name: str, records: Sequence[Record]) -> float:
    return round(fmean(record[name] for record in records), 4)


def _estimate(losses: Sequence[Values]) -> tuple[float, float, float]:
    found = mean(losses)
    return round(found.value, 6), round(found.low, 6), round(found.high, 6)


def lost_tokens(records: Sequence[Record]) -> list[list[float]]:
    """For each next token 1 where it is not full KV's, a list a moment."""
    return [[1.0 - same for same in moment] for record in records for moment in record["top1"]]
