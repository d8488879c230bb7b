"""From records to rows: shares with intervals, by kind and by age of the evidence, and the paired difference to one policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgevlm.bench.accuracy.cells import Cell
from edgevlm.bench.accuracy.entries import ORACLE, Entry
from edgevlm.bench.accuracy.longstream import GAP_NAMES, LONGSTREAM, gap_name
from edgevlm.bench.accuracy.run import Outcome
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.calib.intervals import Estimate, difference, share
from edgevlm.calib.journal import Record

ENTERS = 0.9  # of full KV's answers to a kind must be right, else the kind is left out
NOW, BACKWARD = "now", "backward"
UNSEEN = "unseen"  # what a long stream never showed

Result = dict[str, Any]
Pick = Callable[[Result], bool]
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one budget on one group of questions. held, some: evidence still held, see sitting.Result."""

    policy: str
    budget: str
    kind: str
    share: Estimate
    paired: Estimate | None
    held: float | None
    some: float | None
    cell: Cell
    times: dict[str, float]
    oracles: dict[str, float]

    def line(self, outcome: Outcome, against: str) -> Line:
        settings, paired = outcome.settings, self.paired
        fields = {
            "bench": "accuracy",
            "suite": settings.suite,
            "policy": self.policy,
            "budget": self.budget,
            "kind": self.kind,
            "streams": self.share.clusters,
            "accuracy": self.share.value,
            "ci_low": self.share.low,
            "ci_high": self.share.high,
            "questions": self.share.count,
            "frames": settings.frames,
            "seed": settings.seed,
            "tokens": self.cell.tokens,
            "against": against,
            "difference": paired and paired.value,
            "difference_low": paired and paired.low,
            "difference_high": paired and paired.high,
            "evidence_held": self.held,
            "evidence_any": self.some,
            **self.times,
        }
        return {name: _round(value) for name, value in fields.items()} | ({"oracles": self.oracles} if self.oracles else {})


@dataclass(frozen=True, slots=True)
class Report:
    """left_out: kinds that full KV answers too seldom, with its share."""

    outcome: Outcome
    against: str
    rows: list[Row]
    left_out: dict[str, Estimate]

    def lines(self) -> Iterator[Line]:
        """JSON lines: rows, then kinds left out, then what was skipped."""
        for row in self.rows:
            yield row.line(self.outcome, self.against)
        head = {"bench": "accuracy", "suite": self.outcome.settings.suite}
        for kind, of in self.left_out.items():
            full = {"streams": of.clusters, "accuracy": _round(of.value), "ci_low": _round(of.low), "ci_high": _round(of.high)}
            yield {**head, "policy": "full", "budget": "100%", "kind": kind, **full, "left_out": f"full KV answers < {ENTERS}"}
        for skip in self.outcome.skipped:
            yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}


def make_report(outcome: Outcome, against: str) -> Report:
    """Rows of all cells, the oracles but the best of each budget left out."""
    full = outcome.cells[0]
    long = outcome.settings.suite == LONGSTREAM
    kinds = {kind: share(_clusters(outcome.records[full], _of_kind(kind))) for kind in _kinds(outcome.records[full])}
    entered = [kind for kind, of in kinds.items() if of.value >= ENTERS]
    left_out = {kind: of for kind, of in kinds.items() if of.value < ENTERS}
    cells, best = _without_lesser_oracles(outcome, entered)
    groups = _long_groups(entered) if long else _groups(entered)
    rows: list[Row] = []
    for cell in cells:
        other = next((c for c in outcome.cells if (c.label, c.budget) == (against, cell.budget)), None)
        for name, pick in groups.items():
            rows += _row(outcome, cell, other, name, pick, best.get(cell.budget, {}) if _is_oracle(cell) else {})
    return Report(outcome, against, rows, left_out)


def answers(outcome: Outcome, cell: Cell) -> list[list[bool]]:
    """Whether each answer of a cell is right, a list a stream; kinds that full KV answers too seldom are left out."""
    full = outcome.records[outcome.cells[0]]
    entered = {kind for kind in _kinds(full) if share(_clusters(full, _of_kind(kind))).value >= ENTERS}
    return _clusters(outcome.records[cell], _among(entered))


def _row(outcome: Outcome, cell: Cell, other: Cell | None, name: str, pick: Pick, oracles: dict[str, float]) -> Iterator[Row]:
    records = outcome.records[cell]
    ours = _clusters(records, pick)
    if not any(ours):
        return
    paired = difference(ours, _clusters(outcome.records[other], pick)) if other not in (None, cell) else None
    picked = [result for record in records for result in record["results"] if pick(result)]
    yield Row(
        policy=ORACLE if _is_oracle(cell) else cell.label,
        budget=cell.budget,
        kind=name,
        share=share(ours),
        paired=paired,
        held=_mean([result["held"] for result in picked]),
        some=_mean([result["any"] for result in picked]),
        cell=cell,
        times={
            "ttft_ms": float(np.median([result["ttft_ms"] for result in picked])),
            "compress_ms": float(np.mean([record["compress_ms"] for record in records])),
            "compressions": float(np.mean([record["compressions"] for record in records])),
            "bytes": max(record["bytes"] for record in records),
            "moved": float(np.mean([result.get("moved", 0) for result in picked])),
        },
        oracles=oracles,
    )


def _groups(entered: list[str]) -> dict[str, Pick]:
    """The two aggregates, each by itself and backward by quarter; then each kind, the backward ones by quarter too."""
    now = {kind for kind in entered if is_about_now(kind)}
    before = set(entered) - now
    groups: dict[str, Pick] = {NOW: _among(now), BACKWARD: _among(before)}
    groups |= {f"{BACKWARD}/q{quarter}": _among(before, quarter) for quarter in (1, 2, 3, 4)}
    for kind in entered:
        groups[kind] = _of_kind(kind)
        if kind in before:
            groups |= {f"{kind}/q{quarter}": _among({kind}, quarter) for quarter in (1, 2, 3, 4)}
    return groups


def _long_groups(entered: list[str]) -> dict[str, Pick]:
    """The aggregates: of what was shown, and of that by how long ago; of what never was; then each kind, by age too."""
    now = {kind for kind in entered if is_about_now(kind)}
    before = set(entered) - now

    def ago(kinds: set[str], name: str | None = None) -> Pick:
        return lambda result: (
            result["kind"] in kinds and (result["gap"] is not None if name is None else gap_name(result["gap"]) == name)
        )

    groups: dict[str, Pick] = {NOW: _among(now), BACKWARD: ago(before)}
    groups |= {f"{BACKWARD}/{name}": ago(before, name) for name in GAP_NAMES}
    groups[UNSEEN] = lambda result: result["kind"] in before and result["gap"] is None
    for kind in entered:
        groups[kind] = ago({kind}) if kind in before else _of_kind(kind)
        if kind in before:
            groups |= {f"{kind}/{name}": ago({kind}, name) for name in GAP_NAMES}
    return groups


def _of_kind(kind: str) -> Pick:
    return _among({kind})


def _among(kinds: set[str], quarter: int | None = None) -> Pick:
    return lambda result: result["kind"] in kinds and quarter in (None, result["quarter"])


def _clusters(records: list[Record], pick: Pick) -> list[list[bool]]:
    return [[result["right"] for result in record["results"] if pick(result)] for record in records]


def _kinds(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(result["kind"] for record in records for result in record["results"]))


def _is_oracle(cell: Cell) -> bool:
    return Entry(cell.label).is_oracle


def _without_lesser_oracles(outcome: Outcome, entered: list[str]) -> tuple[list[Cell], dict[str, dict[str, float]]]:
    """All cells but the oracles that are not the best of their budget, and each budget's oracles with their share right."""
    pick = _groups(entered)[BACKWARD]
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in filter(_is_oracle, outcome.cells):
        right = [answer for cluster in _clusters(outcome.records[cell], pick) for answer in cluster]
        shares[cell.budget][cell.label] = round(float(np.mean(right)), 4) if right else 0.0
    best = {budget: max(of, key=of.__getitem__) for budget, of in shares.items()}
    return [cell for cell in outcome.cells if not _is_oracle(cell) or best[cell.budget] == cell.label], shares


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _round(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
