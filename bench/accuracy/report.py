"""The report: fractions right by kind of question and age of the evidence, with intervals and paired differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgevlm.calib.accuracy.cases import LONGSTREAM
from edgevlm.calib.accuracy.compare import ENTERS, Comparison, Pick, clusters
from edgevlm.calib.accuracy.variants import ORACLE, Variant, VariantRun
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.calib.intervals import Estimate, difference, fraction_right

NOW, BACKWARD = "now", "backward"
GAP_NAMES = ("tens", "hundreds", "thousands", "ten thousands")
UNSEEN = "unseen"  # what a long stream never showed
QUARTERS = {f"q{quarter}": f"{BACKWARD}/q{quarter}" for quarter in (1, 2, 3, 4)}
GAPS = {name.replace("thousands", "000s"): f"{BACKWARD}/{name}" for name in GAP_NAMES} | {"never": UNSEEN}
CEILINGS = {False: "full KV", True: "the oracle at 1,024 tokens"}  # which kinds enter is decided by; long streams or not

FRACTIONS = ("appended", "encoded")  # of a frame's tokens and patches

Line = dict[str, Any]
Contest = tuple[str, str]  # oracles are compared that have the same budget, and see and keep the same of a frame


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One policy at one budget on one group of questions. tokens: |M|, or what the policy uses of it; held, some: evidence
    still held, see worker.ask."""

    policy: str
    budget: str
    kind: str
    accuracy: Estimate
    paired: Estimate | None
    held: float | None
    some: float | None
    run: VariantRun
    tokens: int
    times: dict[str, float]
    seen: dict[str, float | None]
    oracles: dict[str, float]

    def line(self, comparison: Comparison, against: str) -> Line:
        settings, paired, variant = comparison.settings, self.paired, Variant(self.run.label)
        fields = {
            **_head(comparison, self.policy, self.budget, self.kind, self.accuracy),
            "append": variant.append,
            "encode": variant.encode,
            "questions": self.accuracy.count,
            "frames": settings.frames,
            "seed": settings.seed,
            "tokens": self.tokens,
            "against": variant.on_full_frames.label if variant.changes else against,
            "difference": paired and paired.value,
            "difference_low": paired and paired.low,
            "difference_high": paired and paired.high,
            "evidence_held": self.held,
            "evidence_any": self.some,
            **self.times,
            **self.seen,
        }
        return {name: _round(value) for name, value in fields.items()} | ({"oracles": self.oracles} if self.oracles else {})


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """left_out: kinds that full KV answers too seldom, and how often."""

    comparison: Comparison
    against: str
    rows: list[ReportRow]
    left_out: dict[str, Estimate]

    def lines(self) -> Iterator[Line]:
        """JSON lines: rows, then kinds left out, then what was skipped."""
        for row in self.rows:
            yield row.line(self.comparison, self.against)
        for kind, of in self.left_out.items():
            fields = _head(self.comparison, "full", "100%", kind, of)
            yield {name: _round(value) for name, value in fields.items()} | {"left_out": f"full KV answers < {ENTERS}"}
        for skip in self.comparison.skipped:
            head = {"bench": "accuracy", "suite": self.comparison.settings.suite}
            yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}


def _head(comparison: Comparison, policy: str, budget: str, kind: str, of: Estimate) -> Line:
    return {
        "bench": "accuracy", "suite": comparison.settings.suite, "policy": policy, "budget": budget, "kind": kind,
        "streams": of.clusters, "accuracy": of.value, "ci_low": of.low, "ci_high": of.high,
    }  # fmt: skip


def make_report(comparison: Comparison, against: str) -> AccuracyReport:
    """Rows of all runs, the oracles but the best of each budget and way to see left out.

    A run of which only what changed is encoded or appended is compared with the same policy on whole frames, the others with
    ``against``.
    """
    kinds = comparison.kinds()
    entered = [kind for kind, of in kinds.items() if of.value >= comparison.enters]
    groups = _groups(entered, comparison.settings.suite == LONGSTREAM)
    backward = _groups(entered, is_long=False)[BACKWARD]
    runs, oracles = _without_lesser_oracles(comparison, backward)
    rows: list[ReportRow] = []
    for run in runs:
        variant = Variant(run.label)
        wanted = variant.on_full_frames.label if variant.changes else against
        other = next((c for c in comparison.runs if (c.label, c.budget) == (wanted, run.budget)), None)
        for name, pick in groups.items():
            rows += _row(comparison, run, other, name, pick, oracles.get(_contest(run), {}) if _is_oracle(run) else {})
    return AccuracyReport(comparison, against, rows, {kind: of for kind, of in kinds.items() if kind not in entered})


def _row(
    comparison: Comparison, run: VariantRun, other: VariantRun | None, name: str, pick: Pick, oracles: dict[str, float]
) -> Iterator[ReportRow]:
    records = comparison.records[run]
    ours = clusters(records, pick)
    if not any(ours):
        return
    paired = None  # of one stream there is no interval
    if other not in (None, run) and sum(map(bool, ours)) > 1:
        paired = difference(ours, clusters(comparison.records[other], pick))
    picked = [result for record in records for result in record["results"] if pick(result)]
    yield ReportRow(
        policy=ORACLE + Variant(run.label).changes if _is_oracle(run) else run.label,
        budget=run.budget,
        kind=name,
        accuracy=fraction_right(ours),
        paired=paired,
        held=_mean([result["held"] for result in picked]),
        some=_mean([result["any"] for result in picked]),
        run=run,
        tokens=max(record["tokens"] for record in records),
        times={
            "ttft_ms": float(np.median([result["ttft_ms"] for result in picked])),
            "compress_ms": float(np.mean([record["compress_ms"] for record in records])),
            "compressions": float(np.mean([record["compressions"] for record in records])),
            **{fraction: float(np.mean([record.get(fraction, 1.0) for record in records])) for fraction in FRACTIONS},
            "tower_bytes": max(record.get("tower_bytes", 0) for record in records),
            "bytes": max(record["bytes"] for record in records),
            "moved": float(np.mean([result.get("moved", 0) for result in picked])),
        },
        seen=_evidence(picked),
        oracles=oracles,
    )


def _groups(entered: list[str], is_long: bool) -> dict[str, Pick]:
    """The aggregates, now and backward, the latter by age too; then each kind, the backward ones by age too.

    Age is the quarter of the stream that last showed the answer, or on long streams how many frames ago that was; what a long
    stream never showed is a group of its own, not a part of backward.
    """
    now = {kind for kind in entered if is_about_now(kind)}
    before = set(entered) - now
    ages: list[Any] = list(GAP_NAMES) if is_long else [1, 2, 3, 4]

    def pick(kinds: set[str], age: Any = None) -> Pick:
        if is_long and kinds <= before:
            return lambda result: (
                result["kind"] in kinds and result["gap"] is not None and age in (None, gap_name(result["gap"]))
            )
        return lambda result: result["kind"] in kinds and age in (None, result["quarter"])

    def by_age(name: str, kinds: set[str]) -> dict[str, Pick]:
        return {f"{name}/{age if is_long else f'q{age}'}": pick(kinds, age) for age in ages}

    groups: dict[str, Pick] = {NOW: lambda result: result["kind"] in now, BACKWARD: pick(before), **by_age(BACKWARD, before)}
    if is_long:
        groups[UNSEEN] = lambda result: result["kind"] in before and result["gap"] is None
    for kind in entered:
        groups |= {kind: pick({kind}), **(by_age(kind, {kind}) if kind in before else {})}
    return groups


def _is_oracle(run: VariantRun) -> bool:
    return Variant(run.label).is_oracle


def _contest(run: VariantRun) -> Contest:
    return run.budget, Variant(run.label).changes


def _without_lesser_oracles(comparison: Comparison, pick: Pick) -> tuple[list[VariantRun], dict[Contest, dict[str, float]]]:
    """All runs but the oracles that are not the best of their contest, and what each oracle has right in each."""
    fractions: dict[Contest, dict[str, float]] = defaultdict(dict)
    for run in filter(_is_oracle, comparison.runs):
        right = [answer for cluster in clusters(comparison.records[run], pick) for answer in cluster]
        fractions[_contest(run)][run.label] = round(float(np.mean(right)), 4) if right else 0.0
    best = {contest: max(of, key=of.__getitem__) for contest, of in fractions.items()}
    return [run for run in comparison.runs if not _is_oracle(run) or best[_contest(run)] == run.label], fractions


def _evidence(picked: list[dict[str, Any]]) -> dict[str, float | None]:
    """What the answers' own evidence is worth.

    hit1, hit3, overlap: of the questions answered right whose evidence is held; a wrong "no longer in memory" counts as a miss.
    said_gone: of those whose evidence is gone, the fraction of which that was said; gone: how many.
    """
    scores = [(result["right"], result["seen"]) for result in picked if result.get("seen")]
    found = [score for right, score in scores if right and score["held"]]
    gone = [score["said_held"] is False for _, score in scores if not score["held"]]
    named = {name: [score[name] * (score["said_held"] is not False) for score in found] for name in ("hit1", "hit3", "overlap")}
    return {name: _mean(values) for name, values in named.items()} | {"said_gone": _mean(gone), "gone": len(gone)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _round(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def describe(report: AccuracyReport) -> str:
    """The report for people: a table a budget; below them what was left out and skipped."""
    settings, rows = report.comparison.settings, report.rows
    streams, is_long = len(next(iter(report.comparison.records.values()))), settings.suite == LONGSTREAM
    ages = "frames since the answer was last shown" if is_long else "the quarter that last showed the answer, q1 to q4"
    by_kind = ", ".join(
        f"{row.kind} {row.accuracy.value:.3f}"
        for row in rows
        if row.run == report.comparison.runs[0] and "/" not in row.kind and row.kind not in (NOW, BACKWARD, UNSEEN)
    )
    lines = [
        f"{settings.suite}: {streams} streams of {settings.frames} frames, seed {settings.seed}; fraction right [95 %, by "
        f"stream]; before by {ages}",
        "",
        f"{CEILINGS[is_long]} by kind: {by_kind}",
    ]
    width = max((len(row.policy) for row in rows), default=0) + 2
    for budget in dict.fromkeys(row.budget for row in rows):
        of_budget = [row for row in rows if row.budget == budget]
        lines += ["", *_budget_table(budget, of_budget, report.against, width, GAPS if is_long else QUARTERS)]
    for kind, of in report.left_out.items():
        lines.append(f"left out: {kind}, {CEILINGS[is_long]} has {_with_interval(of)} of it")
    return "\n".join([*lines, *_skipped(report.comparison)])


def _skipped(comparison: Comparison) -> list[str]:
    return [f"skipped: {skip.label} at {skip.budget}: {skip.reason}" for skip in comparison.skipped]


def _budget_table(budget: str, rows: list[ReportRow], against: str, width: int, ages: Mapping[str, str]) -> Iterator[str]:
    fractions = [fraction for fraction in FRACTIONS if any(row.times[fraction] < 1 for row in rows)]
    heads = (
        f"{'tokens':>7}{''.join(f'{fraction:>9}' for fraction in fractions)}  {'now':<19}{'before':<19}{f'- {against}':<22}"
        + "".join(f"{name:>9}" for name in ages)
    )
    yield f"{budget:<{width}}{heads}{'held':>7}{'any':>6}{'ttft ms':>9}{'compress ms':>12}{'MB moved':>9}"
    for policy in dict.fromkeys(row.policy for row in rows):
        of = {row.kind: row for row in rows if row.policy == policy}
        if BACKWARD not in of:
            continue
        main = of[BACKWARD]
        by_age = "".join(_fraction(of.get(kind), 9) for kind in ages.values())
        times = f"{main.times['ttft_ms']:>9.2f}{main.times['compress_ms']:>12.1f}{main.times['moved'] / 1e6:>9.2f}"
        yield (
            f"{policy:<{width}}{main.tokens:>7}{''.join(_number(main.times[fraction], 9) for fraction in fractions)}"
            f"  {_with_interval(of[NOW].accuracy if NOW in of else None):<19}{_with_interval(main.accuracy):<19}"
            f"{_with_interval(main.paired, signed=True):<22}{by_age}{_number(main.held, 7)}{_number(main.some, 6)}{times}"
        )


def _fraction(row: ReportRow | None, width: int) -> str:
    return _number(row.accuracy.value if row else None, width)


def _number(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"


def _with_interval(of: Estimate | None, signed: bool = False) -> str:
    if of is None:
        return "-"
    plus = "+" if signed else ""
    return f"{of.value:{plus}.3f} [{of.low:{plus}.2f}, {of.high:{plus}.2f}]"


def gap_name(gap: int | None) -> str | None:
    """``tens``, ``hundreds``, ... of frames; None for None."""
    names = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
    return None if gap is None else names[min(len(str(gap)), len(names)) - 1]
