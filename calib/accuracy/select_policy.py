"""Compare the policies on a model at equal bytes; select what ``auto`` runs at each budget, appends and encodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np

from edgevlm import __version__
from edgevlm.calib.accuracy.compare import compare, correct_answers
from edgevlm.calib.accuracy.policy_divergence import QUESTIONS, DivergenceMeter, FullKVReference
from edgevlm.calib.accuracy.select_changed import (
    REFRESH,
    SETTINGS,
    TAUS,
    append_by_agreement,
    append_by_questions,
    append_label,
    appended_fraction,
    encode_by_agreement,
    encode_by_questions,
    encode_label,
)
from edgevlm.calib.accuracy.variants import PLAIN, Budget, Record, key_of, parse_budgets, parse_variants, reason_of
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.calib.intervals import Estimate, Values, fraction_right, is_told_apart, mean
from edgevlm.calib.trace import Clip
from edgevlm.errors import UserError
from edgevlm.progress import Notify, Report
from edgevlm.runtime.budget import TextBudget, default_budget
from edgevlm.runtime.calibration import AppendChoice, Candidate, Choice, Choices, EncodeChoice, Measure
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.files import JsonLines
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import FALLBACK
from edgevlm.runtime.policies import create_policy, evicting
from edgevlm.runtime.settings import AppendChanged

SEED = "11"  # of the demo's streams, among those for development
STREAM = 64  # frames of each
LOW = "12.5%"  # of a clip: the budget that is compared beside the usual one


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """The comparison as typed. budgets: fractions of a clip, or tokens; by default the usual one and LOW."""

    policies: Sequence[str]
    budgets: Sequence[Budget] = ()
    measure: str | None = None
    ask: tuple[str, ...] = ()
    streams: int = 24

    def measured_by(self, model: Model) -> Measure:
        """``streamqa`` for the demo model unless another was asked for, else ``kl``."""
        return "streamqa" if (self.measure or ("streamqa" if model.is_demo else "agreement")) == "streamqa" else "kl"


@dataclass(frozen=True, slots=True)
class ComparisonInput:
    """The model and the clips. frames: of a clip; folder: keeps measurements, which are not repeated."""

    model: Model
    clips: Sequence[Clip]
    frames: int | None
    folder: Path
    progress: Notify
    notify: Notify

    def report_on(self, compared: str) -> Report:
        return lambda what, done=None, total=None: self.progress(f"comparing {compared}: {what}, {done} of {total}")


@dataclass(frozen=True, slots=True)
class MeasuredCandidate:
    """A candidate, and its values cluster by cluster; more is better."""

    candidate: Candidate
    values: Sequence[Values]


@dataclass(slots=True)
class BudgetComparison:
    """All candidates at one budget; skipped: policies that cannot run at it, and why."""

    measured: list[MeasuredCandidate] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


Found = tuple[int, dict[int, BudgetComparison], AppendChoice | None, EncodeChoice | None]  # frames, by budget, ..


def select_policies(request: ComparisonRequest, given: ComparisonInput) -> Choices:
    """Measure every candidate at every budget, and select one at each. Raises UserError."""
    by = request.measured_by(given.model)
    frames, comparisons, append, encode = (_by_questions if by == "streamqa" else _by_divergence)(request, given)
    worlds = (f"{request.streams} demo worlds, seed {SEED}",)
    return Choices(
        edgevlm=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        measure=by,
        watched=worlds if by == "streamqa" else tuple(clip.name for clip in given.clips),
        frames=frames,
        known=tuple(evicting()),
        budgets=tuple(_choices(comparisons, given.notify)),
        append=append,
        encode=encode,
    )


def _choices(comparisons: dict[int, BudgetComparison], notify: Notify) -> Iterator[Choice]:
    """Yield a choice at each budget that a policy can run at, rising. Raises UserError where there is none."""
    for budget, comparison in sorted(comparisons.items()):
        if comparison.measured:
            candidates = tuple(of.candidate for of in comparison.measured)
            yield Choice(budget, select_policy(comparison.measured), candidates, tuple(comparison.skipped))
            continue
        reasons = "; ".join(f"{policy}: {why}" for policy, why in comparison.skipped)
        message = f"budget {budget}: none of the policies can run at it ({reasons})"
        if not any(other.measured for other in comparisons.values()):
            raise UserError(f"{message}; give a larger --budget")
        notify(message)


def select_policy(measured: Sequence[MeasuredCandidate]) -> str | None:
    """Return the policy that compresses fastest among those that cannot be told from the best.

    None, for FALLBACK, where nothing is clearly better: FALLBACK, or all of several, cannot be told from the best. The best has
    the largest mean; paired differences on the same clusters tell policies apart.
    """
    best = max(measured, key=lambda of: mean(of.values).value)
    level = [of.candidate for of in measured if of is best or not is_told_apart(of.values, best.values)]
    if any(of.policy == FALLBACK for of in level) or len(level) == len(measured) > 1:
        return None
    return min(level, key=lambda of: of.compress_ms).policy


def make_candidate(policy: str, records: Sequence[Record], estimate: Estimate, top1: float | None = None) -> Candidate:
    """Make a candidate of its records, one a stream, and the estimate of its value."""
    return Candidate(
        policy=policy,
        tokens=records[0]["tokens"],
        value=round(estimate.value, 6),
        ci_low=round(estimate.low, 6),
        ci_high=round(estimate.high, 6),
        compress_ms=round(fmean(record["compress_ms"] for record in records), 3),
        bytes=max(record["bytes"] for record in records),
        top1=None if top1 is None else round(top1, 6),
    )


def usual_budget(model: Model) -> int:
    """|M| of a session without a budget of its own."""
    text, prefix = TextBudget.fitting(model.bundle.limit), model.encode(Chat(model.bundle.chat).prefix)
    most = model.bundle.limit - len(prefix) - text.rows(model)
    return default_budget(model, create_policy(PLAIN.policy), most)


def budgets_of(request: ComparisonRequest, given: ComparisonInput, clip_tokens: int) -> list[int]:
    """|M| of each budget, rising. One that holds a whole clip tells nothing: raises UserError if typed, else leaves it out."""
    wanted = request.budgets or [Budget("", count=usual_budget(given.model)), *parse_budgets(LOW)]
    tokens = sorted({budget.tokens(clip_tokens) for budget in wanted})
    least = 1 if request.budgets else given.model.bundle.vision.tokens_per_frame
    left = [budget for budget in tokens if least <= budget < clip_tokens]
    if request.budgets and left != tokens:
        typed = ",".join(budget.text for budget in request.budgets)
        raise UserError(f"--budget {typed}: must lie within a clip's {clip_tokens} tokens; give less, like {LOW}")
    if not left:
        raise UserError(
            f"{clip_tokens} tokens, the shortest clip, tell no policies apart; give longer clips, or --policies none"
        )
    for budget in (budget for budget in tokens if budget >= clip_tokens):
        why = f"holds a whole clip, {clip_tokens} tokens, and is not compared"
        given.notify(f"the usual budget, {budget} tokens, {why}; give longer clips")
    return left


def _by_questions(request: ComparisonRequest, given: ComparisonInput) -> Found:
    """Compare by the streamqa suite's questions of the kinds that full KV answers, on development seeds."""
    model, frames = given.model, given.frames or STREAM
    stream_tokens = frames * model.bundle.vision.tokens_per_frame
    budgets = budgets_of(request, given, stream_tokens)
    settings, journal = AccuracySettings(str(model.bundle.path), frames, SEED), given.folder / "streamqa.jsonl"
    found = compare(
        settings,
        parse_variants([",".join(request.policies)]),
        [Budget(str(budget), count=budget) for budget in budgets],
        request.streams,
        out=journal,
        resume=True,
        model=model,
        progress=given.report_on("policies"),
    )
    comparisons = {budget: BudgetComparison() for budget in budgets}
    for skip in found.skipped:
        comparisons[int(skip.budget)].skipped.append((skip.label, skip.reason))
    for run in found.runs[1:]:
        right = correct_answers(found, run)
        if not any(right):
            raise UserError("full KV answers too few of the demo world's questions; give --measure agreement")
        measured = MeasuredCandidate(make_candidate(run.label, found.records[run], fraction_right(right)), right)
        comparisons[int(run.budget)].measured.append(measured)
    try:
        append = append_by_questions(settings, request.streams, journal, model, given.report_on("--append"))
    except UserError as error:  # no positions for the present beside a whole stream
        given.notify(f"--append changed is not compared: {error}")
        append = None
    encode = None
    if model.bundle.vision.changed is not None:
        encode = encode_by_questions(settings, request.streams, journal, model, given.report_on("--encode"))
    return frames, comparisons, append, encode


def _by_divergence(request: ComparisonRequest, given: ComparisonInput) -> Found:
    """Compare by divergence from full KV's next tokens, on as many frames of each clip as the shortest has."""
    meter = DivergenceMeter(given.model, request.ask or QUESTIONS)
    longest, limit = meter.longest()
    tokens = [budget.count for budget in request.budgets if budget.count] or [usual_budget(given.model)]
    wanted = given.frames or 2 * max(tokens) // meter.per_frame
    if wanted > longest:
        given.notify(f"full KV can hold {longest} frames ({limit}): that many of a clip are compared, not {wanted}")
    given.progress("counting frames")
    frames = min(sum(1 for _ in islice(clip.frames, min(wanted, longest))) for clip in given.clips)
    budgets = budgets_of(request, given, frames * meter.per_frame)
    journal = given.folder / f"kl-{frames}.jsonl"
    return frames, *compare_by_divergence(meter, given.clips, frames, request.policies, budgets, journal, given.progress)


def compare_by_divergence(
    meter: DivergenceMeter,
    clips: Sequence[Clip],
    frames: int,
    policies: Sequence[str],
    budgets: Sequence[int],  # rising
    journal: Path,
    progress: Notify,
) -> tuple[dict[int, BudgetComparison], AppendChoice, EncodeChoice | None]:
    """Stream the first ``frames`` of every clip under full KV, each policy at each budget, each tau and each way to encode.

    Records in ``journal`` are not measured again. Clusters are (clip, moment). Raises UserError.
    """
    comparisons = {budget: BudgetComparison() for budget in budgets}
    runs: list[tuple[int, str, int]] = []  # budget, policy, its |M|
    for budget in budgets:
        for policy in policies:
            progress(f"comparing policies: equal bytes: {policy} at {budget} tokens")
            try:
                runs.append((budget, policy, meter.fitted(policy, budget, frames)))
            except UserError as error:
                comparisons[budget].skipped.append((policy, reason_of(error)))
    least, settings = budgets[0], SETTINGS if meter.model.bundle.vision.changed is not None else ()

    def measure_policy(policy: str, tokens: int, budget: int, reference: FullKVReference, clip: Clip) -> Record:
        return meter.measure(reference, create_policy(policy), tokens, budget)

    def measure_append(tau: float, reference: FullKVReference, clip: Clip) -> Record:
        record = meter.measure_append(reference, AppendChanged(tau), frames, least)
        return record | {"refreshed": appended_fraction(reference.features, AppendChanged(tau, REFRESH))}

    jobs: list[tuple[str, int, Callable[[FullKVReference, Clip], Record]]] = [
        *((policy, budget, partial(measure_policy, policy, tokens, budget)) for budget, policy, tokens in runs),
        *((append_label(tau), least, partial(measure_append, tau)) for tau in TAUS),
        *((encode_label(way), least, partial(meter.measure_encode, way, least)) for way in settings),
    ]
    with JsonLines(journal, {"journal": "edgevlm calibrate"}, key_of) as saved:
        for number, clip in enumerate(clips):
            todo = [job for job in jobs if (job[0], str(job[1]), number) not in saved.records]
            if not todo:
                continue
            progress(f"comparing policies: {clip.name}: full KV")
            reference = meter.reference(clip, frames, least)
            for done, (label, budget, measure) in enumerate(todo, 1):
                progress(f"comparing policies: {clip.name}: {label} at {budget} tokens ({done} of {len(todo)})")
                saved.add({"policy": label, "budget": str(budget), "stream": number, **measure(reference, clip)})

        def of_clips(label: str, budget: int) -> list[Record]:
            return [saved.records[label, str(budget), number] for number in range(len(clips))]

        for budget, policy, _ in runs:
            records = of_clips(policy, budget)
            nats = [moment for record in records for moment in record["kl"]]
            top1 = float(np.mean([same for record in records for moment in record["top1"] for same in moment]))
            values = [[-value for value in moment] for moment in nats]
            comparisons[budget].measured.append(MeasuredCandidate(make_candidate(policy, records, mean(nats), top1), values))
        append = append_by_agreement([of_clips(append_label(tau), least) for tau in TAUS])
        encode = encode_by_agreement([of_clips(encode_label(way), least) for way in settings]) if settings else None
    return comparisons, append, encode
