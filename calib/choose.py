"""Which of several policies to run at a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from edgevlm.calib.intervals import Estimate, Values, mean, mean_difference
from edgevlm.calib.journal import Record
from edgevlm.errors import UserError
from edgevlm.runtime.choices import Candidate


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate, and the values by cluster, more is better, that it is chosen by."""

    candidate: Candidate
    values: Sequence[Values]


@dataclass(slots=True)
class Contest:
    """What was measured at one budget; skipped: policies that cannot run at it, and why."""

    measured: list[Measured] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def candidate(policy: str, records: Sequence[Record], estimate: Estimate, top1: float | None = None) -> Candidate:
    """A candidate from its records, one a stream, and the estimate of its value."""
    value, low, high = (round(number, 6) for number in (estimate.value, estimate.low, estimate.high))
    return Candidate(
        policy=policy,
        tokens=records[0]["tokens"],
        value=value,
        ci_low=low,
        ci_high=high,
        compress_ms=round(fmean(record["compress_ms"] for record in records), 3),
        bytes=max(record["bytes"] for record in records),
        top1=None if top1 is None else round(top1, 6),
    )


def choose(measured: Sequence[Measured]) -> str:
    """Of the policies that cannot be told from the best, the one that takes least time to compress.

    The best has the largest mean. A policy can be told from it when the 95 % interval of their paired difference, on the same
    clusters in the same order, leaves out 0.
    """
    best = max(measured, key=lambda of: mean(of.values).value)
    level = [of.candidate for of in measured if not _worse(of, best)]
    return min(level, key=lambda of: of.compress_ms).policy


def _worse(measured: Measured, best: Measured) -> bool:
    paired = mean_difference(measured.values, best.values)
    return not paired.low <= 0 <= paired.high


def reason_of(error: UserError) -> str:
    """Why a policy cannot run at a budget, without the advice to ``--budget``."""
    return str(error).partition("; give --budget")[0]
