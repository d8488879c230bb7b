"""Compare the policies on a model at equal bytes, and select the policies and settings that ``auto`` uses.

For ``append`` and ``encode``, the selected setting saves the most while changing few of full KV's next tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np

from edgevlm import __version__
from edgevlm.calib.accuracy.policy_divergence import QUESTIONS, DivergenceMeter, FullKVReference
from edgevlm.calib.accuracy.variants import FULL, PLAIN, Budget, Record, key_of, parse_budgets, reason_of
from edgevlm.calib.intervals import Values, half_width, is_told_apart, mean
from edgevlm.calib.trace import Clip
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.budget import TextBudget, default_budget
from edgevlm.runtime.calibration import AppendChoice, AppendTrial, Candidate, Choice, Choices, EncodeChoice, EncodeTrial
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.files import JsonLines
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import FALLBACK
from edgevlm.runtime.policies import create_policy, evicting
from edgevlm.runtime.settings import AppendChanged, EncodeChanged

TAUS = (0.999, 0.99, 0.97, 0.95)  # the values of tau to try for --append
SETTINGS = (EncodeChanged(64, 12), EncodeChanged(64, 6), EncodeChanged(16, 6), EncodeChanged(4, 6))
BOUND = 0.05  # the largest fraction of full KV's next tokens that a setting may change,
SAVING = 0.1  # and the smallest fraction of tokens or patches worth saving
LOW = "12.5%"

Trial = TypeVar("Trial", AppendTrial, EncodeTrial)


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """What to compare. ``budgets``: by default :func:`usual_budget` and LOW."""

    policies: Sequence[str]
    budgets: Sequence[Budget] = ()
    ask: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparisonInput:
    """The model and the clips. ``frames``: how many frames of each clip to watch. ``folder``: where measurements are kept."""

    model: Model
    clips: Sequence[Clip]
    frames: int | None
    folder: Path
    progress: Notify
    notify: Notify


class MeasuredCandidate(NamedTuple):
    """A policy, and for each cluster its KL divergences, negated so that larger is better."""

    candidate: Candidate
    values: Sequence[Values]


class Compared(NamedTuple):
    """The candidates and the skipped policies at each budget, and the choices for ``append`` and ``encode``."""

    measured: dict[int, list[MeasuredCandidate]]
    skipped: dict[int, list[tuple[str, str]]]
    append: AppendChoice
    encode: EncodeChoice | None


def select_policies(request: ComparisonRequest, given: ComparisonInput) -> Choices:
    """Measure every policy at every budget, and select one for each budget. Raises UserError.

    Policies are compared by how far their next-token distributions diverge from those of full KV. All clips are cut to the
    shortest clip's length.
    """
    meter = DivergenceMeter(given.model, request.ask or QUESTIONS)
    tokens = [budget.count for budget in request.budgets if budget.count] or [usual_budget(given.model)]
    wanted, longest = given.frames or 2 * max(tokens) // meter.per_frame, meter.longest()
    if wanted > longest:
        given.notify(f"full KV can hold only {longest} frames: comparing {longest} frames of each clip, not {wanted}")
    given.progress("counting frames")
    frames = min(sum(1 for _ in islice(clip.frames, min(wanted, longest))) for clip in given.clips)
    budgets = budgets_of(request, given.model, frames * meter.per_frame)
    journal = given.folder / f"kl-{frames}.jsonl"
    found = compare_by_divergence(meter, given.clips, frames, request.policies, budgets, journal, given.progress)
    return Choices(
        edgevlm=__version__, date=datetime.now(timezone.utc).isoformat(timespec="seconds"), measure="kl",
        watched=tuple(clip.name for clip in given.clips), frames=frames, known=tuple(evicting()),
        budgets=tuple(_choices(found, given.notify)), append=found.append, encode=found.encode,
    )  # fmt: skip


def _choices(found: Compared, notify: Notify) -> Iterator[Choice]:
    """Yield a choice for each budget at which any policy can run, smallest budget first.

    Raises UserError if no policy can run at any budget.
    """
    for budget, measured in sorted(found.measured.items()):
        skipped = found.skipped[budget]
        if measured:
            yield Choice(budget, select_policy(measured), tuple(of.candidate for of in measured), tuple(skipped))
            continue
        reasons = "; ".join(f"{policy}: {why}" for policy, why in skipped)
        message = f"budget {budget}: no policy can run ({reasons})"
        if not any(found.measured.values()):
            raise UserError(f"{message}; set a larger --budget")
        notify(message)


def select_policy(measured: Sequence[MeasuredCandidate]) -> str | None:
    """Return the fastest of the policies that are as good as the best one, or None to select FALLBACK.

    A policy is as good as the best if the interval of their paired difference includes 0. FALLBACK is selected if it is as good
    as the best policy, or if several policies were compared and none is worse than the best.
    """
    best = max(measured, key=lambda of: mean(of.values).value)
    level = [of.candidate for of in measured if of is best or not is_told_apart(of.values, best.values)]
    if any(of.policy == FALLBACK for of in level) or len(level) == len(measured) > 1:
        return None
    return min(level, key=lambda of: of.compress_ms).policy


def usual_budget(model: Model) -> int:
    """Return the vision tokens per layer that a session gets by default."""
    text, prefix = TextBudget.fitting(model.bundle.limit), Chat(model.bundle.chat, model.tokenizer).prefix
    return default_budget(model, create_policy(PLAIN.policy), model.bundle.limit - len(prefix) - text.rows(model))


def budgets_of(request: ComparisonRequest, model: Model, clip_tokens: int) -> list[int]:
    """Return the budgets in tokens, smallest first.

    Raises UserError if a requested budget holds a whole clip, or if the clip is too short for the default budgets.
    """
    wanted = request.budgets or [Budget("", count=usual_budget(model)), *parse_budgets(LOW)]
    tokens = sorted({budget.tokens(clip_tokens) for budget in wanted})
    least = 1 if request.budgets else model.bundle.vision.tokens_per_frame
    left = [budget for budget in tokens if least <= budget < clip_tokens]
    if request.budgets and left != tokens:
        typed = ",".join(budget.text for budget in request.budgets)
        raise UserError(f"--budget {typed}: must be below a clip's {clip_tokens} tokens; set a lower one, such as {LOW}")
    if not left:
        raise UserError(
            f"the shortest clip ({clip_tokens} tokens) is too short to compare policies; use longer clips, or --policies none"
        )
    return left


def compare_by_divergence(
    meter: DivergenceMeter, clips: Sequence[Clip], frames: int, policies: Sequence[str], budgets: Sequence[int],
    journal: Path, progress: Notify,
) -> Compared:  # fmt: skip
    """Compare all policies at all budgets, and all ``append`` and ``encode`` settings, with full KV.

    ``budgets``: smallest first. Measurements that are in ``journal`` are not repeated. Raises UserError.
    """
    jobs: dict[tuple[str, int], Callable[[FullKVReference, Clip], Record]] = {}  # by label and budget
    least, skipped = budgets[0], {budget: list[tuple[str, str]]() for budget in budgets}
    for budget, policy in product(budgets, policies):
        progress(f"comparing policies: equal bytes: {policy} at {budget} tokens")
        try:
            jobs[policy, budget] = partial(_measure_policy, meter, policy, meter.fitted(policy, budget, frames), budget)
        except UserError as error:
            skipped[budget].append((policy, reason_of(error)))
    runs, ways = list(jobs), SETTINGS if meter.model.bundle.vision.changed is not None else ()
    appends = {(f"{FULL}@{way}", least): partial(meter.measure_append, way, frames, least) for way in map(AppendChanged, TAUS)}
    encodes = {(f"{FULL}@encode:{way}", least): partial(meter.measure_encode, way, least) for way in ways}
    jobs |= appends | encodes
    with JsonLines(journal, {"journal": "edgevlm calibrate"}, key_of) as saved:
        for number, clip in enumerate(clips):
            todo = [key for key in jobs if (key[0], str(key[1]), number) not in saved.records]
            if not todo:
                continue
            progress(f"comparing policies: {clip.name}: full KV")
            reference = meter.reference(clip, frames, least)
            for done, (label, budget) in enumerate(todo, 1):
                progress(f"comparing policies: {clip.name}: {label} at {budget} tokens ({done} of {len(todo)})")
                record = jobs[label, budget](reference, clip)
                saved.add({"policy": label, "budget": str(budget), "stream": number, **record})
    of = {key: [saved.records[key[0], str(key[1]), number] for number in range(len(clips))] for key in jobs}
    measured = {budget: [_candidate(key[0], of[key]) for key in runs if key[1] == budget] for budget in budgets}
    append = select_append([of[key] for key in appends])
    return Compared(measured, skipped, append, select_encode([of[key] for key in encodes]) if encodes else None)


def _measure_policy(
    meter: DivergenceMeter, policy: str, tokens: int, budget: int, reference: FullKVReference, clip: Clip
) -> Record:
    return meter.measure(reference, create_policy(policy), tokens, budget)


def _candidate(policy: str, records: Sequence[Record]) -> MeasuredCandidate:
    """Summarise a policy's records, one per clip. The values measured at one moment of a clip form a cluster."""
    nats = [moment for record in records for moment in record["kl"]]
    top1 = float(np.mean([same for record in records for moment in record["top1"] for same in moment]))
    found = mean(nats)
    candidate = Candidate(
        policy=policy, tokens=records[0]["tokens"], value=round(found.value, 6), ci_low=round(found.low, 6),
        ci_high=round(found.high, 6), compress_ms=round(fmean(record["compress_ms"] for record in records), 3),
        bytes=max(record["bytes"] for record in records), top1=round(top1, 6),
    )  # fmt: skip
    return MeasuredCandidate(candidate, [[-value for value in moment] for moment in nats])


def best_trial(trials: Sequence[Trial], losses: Sequence[Sequence[Values]], taken: str) -> Trial | None:
    """Return the trial that appends or encodes the smallest fraction without losing too much, or None.

    A trial counts only if it saves at least SAVING and loses at most BOUND. ``taken``: the field to compare, ``appended`` or
    ``encoded``. ``losses``: the losses of each trial, one list per cluster.
    """
    fit = [
        (getattr(trial, taken), trial)
        for trial, lost in zip(trials, losses, strict=True)
        if getattr(trial, taken) <= 1 - SAVING and _surely_within(lost)
    ]
    return min(fit, key=lambda pair: pair[0])[1] if fit else None


def _surely_within(losses: Sequence[Values]) -> bool:
    """Return whether the upper end of Student's 95 % interval of the mean loss is at most BOUND.

    A loss of 1 is added to the measured losses, so that a few losses of 0 are not taken as proof.
    """
    found = mean([[1.0, *losses[0]], *losses[1:]])
    return found.value + half_width(found) <= BOUND


def select_append(records: Sequence[Sequence[Record]]) -> AppendChoice:
    """Select the setting for ``append``. ``records``: for each tau, one record per clip."""
    trials = [AppendTrial(tau, *_estimates("appended", of)) for tau, of in zip(TAUS, records, strict=True)]
    best = best_trial(trials, list(map(_lost_tokens, records)), "appended")
    return AppendChoice(best.tau if best else None, BOUND, tuple(trials))


def select_encode(records: Sequence[Sequence[Record]]) -> EncodeChoice:
    """Select the setting for ``encode``. ``records``: for each of SETTINGS, one record per clip."""
    trials = [
        EncodeTrial(str(way), *_estimates("encoded", of), min(record["low_cosine"] for record in of))
        for way, of in zip(SETTINGS, records, strict=True)
    ]
    best = best_trial(trials, list(map(_lost_tokens, records)), "encoded")
    return EncodeChoice(best.setting if best else None, BOUND, tuple(trials))


def _estimates(taken: str, records: Sequence[Record]) -> tuple[float, float, float, float]:
    """Return the mean of the field ``taken``, then the mean loss and the ends of its 95 % interval."""
    found = mean(_lost_tokens(records))
    return (
        round(fmean(record[taken] for record in records), 4),
        round(found.value, 6),
        round(found.low, 6),
        round(found.high, 6),
    )


def _lost_tokens(records: Sequence[Record]) -> list[list[float]]:
    """Return which next tokens differ from those of full KV, as one list of ones and zeros per moment."""
    return [[1.0 - same for same in moment] for record in records for moment in record["top1"]]
