"""``edgevlm bench accuracy``: from what was typed to the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgevlm.bench.accuracy.report import describe, describe_turns, make_report, turn_rows
from edgevlm.calib.accuracy.cases import LONGSTREAM, seed_words
from edgevlm.calib.accuracy.compare import compare
from edgevlm.calib.accuracy.variants import Budget, Variant, parse_budgets, parse_tokens, parse_variants
from edgevlm.calib.accuracy.worker import GUIDED, Settings
from edgevlm.calib.plots import check_plot
from edgevlm.errors import UserError
from edgevlm.progress import progress

USUAL = "infinipot-v"  # what paired differences are to, if it is there


@dataclass(frozen=True, slots=True)
class AccuracyRequest:
    """The options, as typed."""

    suite: str
    model: str
    policy: list[str]
    budget: str
    frames: int
    streams: int
    seed: str
    against: str | None
    turns: int
    out: Path | None
    resume: bool
    workers: int
    plot: Path | None
    as_json: bool


def start(request: AccuracyRequest) -> str:
    """Run to the end; the report as text or JSON lines. Raises UserError before anything is measured where that is possible."""
    variants, budgets = parse_request(request)
    settings = Settings(request.model, request.frames, request.seed, request.turns, request.suite)
    with progress("loading the model") as step, resume_hint(request.out):
        comparison = compare(
            settings, variants, budgets, request.streams, out=request.out, resume=request.resume, workers=request.workers,
            progress=step,
        )  # fmt: skip
    if request.turns:
        rows = list(turn_rows(comparison))
        return _json_lines([row.line(comparison) for row in rows]) if request.as_json else describe_turns(comparison, rows)
    report = make_report(comparison, reference(request.against, variants))
    if request.plot:
        from edgevlm.bench.accuracy.plot import plot

        plot(report, request.plot)
    return _json_lines(list(report.lines())) if request.as_json else describe(report)


def parse_request(request: AccuracyRequest) -> tuple[list[Variant], list[Budget]]:
    """What to compare; what the installed policies do not have is named on stderr."""
    try:
        seed_words(request.seed)
    except ValueError:
        raise UserError(f"--seed {request.seed}: give a number from 0 up, or test for the seeds kept for reports") from None
    if request.resume and request.out is None:
        raise UserError("--resume goes on with the journal of an earlier run: name it with --out FILE")
    if request.suite == LONGSTREAM and (request.plot or request.turns):
        raise UserError(f"--suite {LONGSTREAM} asks one way and has no plot; leave out --plot and --turns")
    if request.plot and request.turns:
        raise UserError("--plot draws one question each; leave out --turns")
    if request.plot:
        check_plot(request.plot)
    variants, missing = parse_variants(request.policy)
    reference(request.against, variants)
    if request.turns and Variant(GUIDED).exists:
        variants = list(dict.fromkeys([*variants, Variant(GUIDED)]))
    elif request.turns:
        missing.append(GUIDED)
    for label in missing:
        print(f"left out: {label}, which the installed policies have no setting for", file=sys.stderr)
    return variants, parse_tokens(request.budget) if request.suite == LONGSTREAM else parse_budgets(request.budget)


def reference(against: str | None, variants: list[Variant]) -> str:
    """The policy that differences are to. Raises UserError for one that is not compared."""
    labels = [variant.label for variant in variants if not variant.is_oracle]
    if against is not None and against not in labels:
        raise UserError(f"--against {against}: is not among the policies compared; add it to --policy")
    return against or next((label for label in labels if label == USUAL), labels[0] if labels else USUAL)


def _json_lines(lines: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)


@contextmanager
def resume_hint(out: Path | None) -> Iterator[None]:
    """Say how to go on after ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        hint = (
            f"stopped; the same command with --resume goes on ({out})"
            if out
            else "stopped; --out FILE would have kept what was done"
        )
        print(hint, file=sys.stderr)
        raise
