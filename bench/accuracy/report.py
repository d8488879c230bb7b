"""Report how often each policy answered right, by the kind of question and by how long ago the answer was shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from edgevlm.calib.accuracy.cases import LONGSTREAM
from edgevlm.calib.accuracy.compare import Comparison, Pick, clusters
from edgevlm.calib.accuracy.variants import ORACLE, Variant, VariantRun
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.calib.intervals import Estimate, difference, fraction_right

NOW, BACKWARD = "now", "backward"
GAP_NAMES = ("tens", "hundreds", "thousands", "ten thousands")
RECORDED = ("compress_ms", "compressions", "appended", "encoded")  # fields of each record; old records lack the last two
SCORED = ("hit1", "hit3", "overlap")
UNSEEN = "unseen"  # questions about things that a long stream never showed

Line = dict[str, Any]
Contest = tuple[str, str]  # (budget, ``append`` and ``encode``)


def report_lines(comparison: Comparison, against: str) -> Iterator[Line]:
    """Yield the rows of the report.

    Each policy's results come first, then the kinds of question that full KV rarely gets right, then the policies that were
    skipped. At each budget, only the best oracle is reported. A policy that encodes or appends only changes is compared with
    the same policy on whole frames. Every other policy is compared with ``against``.
    """
    kinds, settings = comparison.kinds(), comparison.settings
    entered = [kind for kind, of in kinds.items() if of.value >= comparison.enters]
    groups = _groups(entered, settings.suite == LONGSTREAM)
    runs, oracles = _without_lesser_oracles(comparison, _groups(entered, is_long=False)[BACKWARD])
    for run in runs:
        variant, records = Variant(run.label), comparison.records[run]
        wanted = variant.on_full_frames.label if variant.changes else against
        other = next((each for each in comparison.runs if (each.label, each.budget) == (wanted, run.budget)), None)
        policy = ORACLE + variant.changes if variant.is_oracle else run.label
        for name, pick in groups.items():
            if not any(ours := clusters(records, pick)):
                continue
            paired = None  # one stream alone gives no confidence interval
            if other not in (None, run) and sum(map(bool, ours)) > 1:
                paired = difference(ours, clusters(comparison.records[other], pick))
            accuracy = fraction_right(ours)
            fields = {
                **_head(comparison, policy, run.budget, name, accuracy), "append": variant.append, "encode": variant.encode,
                "questions": accuracy.count, "frames": settings.frames, "seed": settings.seed, **_figures(records, pick),
                "against": wanted, "difference": paired and paired.value, "difference_low": paired and paired.low,
                "difference_high": paired and paired.high,
            }  # fmt: skip
            yield _rounded(fields) | ({"oracles": oracles[_contest(run)]} if variant.is_oracle else {})
    for kind, of in kinds.items():
        if kind not in entered:
            yield _rounded(_head(comparison, "full", "100%", kind, of)) | {"left_out": f"full KV answers < {comparison.enters}"}
    for skip in comparison.skipped:
        head = {"bench": "accuracy", "suite": settings.suite}
        yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}


def _head(comparison: Comparison, policy: str, budget: str, kind: str, of: Estimate) -> Line:
    return {
        "bench": "accuracy", "suite": comparison.settings.suite, "policy": policy, "budget": budget, "kind": kind,
        "streams": of.clusters, "accuracy": of.value, "ci_low": of.low, "ci_high": of.high,
    }  # fmt: skip


def _figures(records: Sequence[Line], pick: Pick) -> Line:
    """Return a run's memory use and evidence scores for the picked questions.

    A wrong "no longer in memory" counts as a miss.
    """
    picked = [result for record in records for result in record["results"] if pick(result)]
    scores = [(result["right"], result["seen"]) for result in picked if result.get("seen")]
    found = [score for right, score in scores if right and score["held"]]
    gone = [score["said_held"] is False for _, score in scores if not score["held"]]
    return {
        "tokens": max(record["tokens"] for record in records),
        "evidence_held": _mean([result["held"] for result in picked]),
        "evidence_any": _mean([result["any"] for result in picked]),
        "ttft_ms": float(np.median([result["ttft_ms"] for result in picked])),
        **{name: _mean([record.get(name, 1.0) for record in records]) for name in RECORDED},
        "tower_bytes": max(record.get("tower_bytes", 0) for record in records),
        "bytes": max(record["bytes"] for record in records),
        "moved": _mean([result.get("moved", 0) for result in picked]),
        **{name: _mean([score[name] * (score["said_held"] is not False) for score in found]) for name in SCORED},
        "said_gone": _mean(gone),
        "gone": len(gone),
    }


def _groups(entered: list[str], is_long: bool) -> dict[str, Pick]:
    """Return the groups of questions to report: all questions about now, all questions about the past, and each kind.

    Questions about the past are also grouped by when the answer was last shown: in which quarter of a short stream, or how many
    frames ago in a long stream. On long streams, questions about things never shown are a separate group.
    """
    before = {kind for kind in entered if not is_about_now(kind)}

    def of(kinds: set[str], age: Any = None, is_shown: bool = False) -> Pick:
        def pick(result: Line) -> bool:
            found = gap_name(result["gap"]) if is_long else result["quarter"]
            return result["kind"] in kinds and age in (None, found) and not (is_shown and is_long and result["gap"] is None)

        return pick

    def aged(name: str, kinds: set[str]) -> dict[str, Pick]:
        ages = {f"/{gap}": gap for gap in GAP_NAMES} if is_long else {f"/q{quarter}": quarter for quarter in (1, 2, 3, 4)}
        return {f"{name}{suffix}": of(kinds, age, True) for suffix, age in {"": None, **ages}.items()}

    groups: dict[str, Pick] = {NOW: of(set(entered) - before), **aged(BACKWARD, before)}
    if is_long:
        groups[UNSEEN] = lambda result: result["kind"] in before and result["gap"] is None
    for kind in entered:
        groups |= aged(kind, {kind}) if kind in before else {kind: of({kind})}
    return groups


def _contest(run: VariantRun) -> Contest:
    return run.budget, Variant(run.label).changes


def _without_lesser_oracles(comparison: Comparison, pick: Pick) -> tuple[list[VariantRun], dict[Contest, dict[str, float]]]:
    """Drop every oracle that another oracle beats. Also return how often each oracle answered right."""
    fractions: dict[Contest, dict[str, float]] = defaultdict(dict)
    for run in (run for run in comparison.runs if Variant(run.label).is_oracle):
        right = [answer for cluster in clusters(comparison.records[run], pick) for answer in cluster]
        fractions[_contest(run)][run.label] = round(float(np.mean(right)), 4) if right else 0.0
    best = {(contest, max(of, key=of.__getitem__)) for contest, of in fractions.items()}
    kept = [run for run in comparison.runs if not Variant(run.label).is_oracle or (_contest(run), run.label) in best]
    return kept, fractions


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _rounded(line: Line) -> Line:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()}


def gap_name(gap: int | None) -> str | None:
    """Return the order of magnitude of a number of frames: ``tens``, ``hundreds``, ..."""
    names = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
    return None if gap is None else names[min(len(str(gap)), len(names)) - 1]
