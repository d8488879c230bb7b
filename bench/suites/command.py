"""``edgevlm bench accuracy`` of a published suite: from what was typed to the report."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.bundles.cache import bundle_of
from edgevlm.apps.run.launch import parse_count, to_stderr
from edgevlm.bench.accuracy.command import goes_on, progress_bar
from edgevlm.bench.suites import suite_of
from edgevlm.bench.suites.judge import Judge
from edgevlm.bench.suites.progress import Lines
from edgevlm.bench.suites.report import describe, lines
from edgevlm.bench.suites.run import Job, Progress, SuiteResults, evaluate
from edgevlm.calib.accuracy.variants import FULL, Variant, parse_variants, split
from edgevlm.errors import UserError

BUDGET = "6k"  # InfiniPot-V's and HERMES's


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """The options, as typed."""

    suite: str
    data: Path | None
    model: str
    policy: list[str]
    budget: str | None
    fps: float
    out: Path | None
    resume: bool
    workers: int
    judge_url: str | None
    judge_model: str | None
    as_json: bool


def start_suite(request: SuiteRequest) -> str:
    """Run to the end; the report as text or JSON lines. Raises UserError before the model is loaded where that is possible."""
    judge = judge_of(request.judge_url, request.judge_model)
    job = job_of(request)
    if judge is not None and request.out is None:
        to_stderr("note: without --out the judge's verdicts are kept nowhere")
    with _progress() as progress, goes_on(request.out):
        outcome = evaluate(job, progress, to_stderr, judge)
    _submit(outcome)
    if request.as_json:
        return "\n".join(json.dumps(line, ensure_ascii=False) for line in lines(outcome))
    return describe(outcome)


def job_of(request: SuiteRequest) -> Job:
    """What to run. Raises UserError for what cannot be."""
    if request.data is None:
        raise UserError(f"--suite {request.suite}: name the folder of its data with --data DIR (docs/benchmarks.md)")
    if not request.data.is_dir():
        raise UserError(f"--data {request.data}: is not a folder; give the one that the benchmark was downloaded to")
    if not 0 < request.fps <= 1000:
        raise UserError(f"--fps {request.fps:g}: give frames a second, from above 0 to 1000")
    if request.resume and request.out is None:
        raise UserError("--resume goes on with the journal of an earlier run: name it with --out FILE")
    variants, missing = parse_variants(request.policy)
    if any(variant.is_oracle for variant in variants) and not any("all" in split(text) for text in request.policy):
        raise UserError("--policy oracle: is known of the demo world alone (--suite streamqa); leave it out")
    for label in missing:
        to_stderr(f"left out: {label}, which the installed policies have no setting for")
    return Job(
        suite=request.suite, data=request.data, model=bundle_of(request.model, lambda what: None, to_stderr), fps=request.fps,
        variants=[one for one in variants if not one.is_oracle], budgets=parse_token_budgets(request.budget or BUDGET),
        full=any(Variant(name).policy == FULL for text in request.policy for name in split(text)), out=request.out,
        resume=request.resume, workers=request.workers, threads=max(1, (os.cpu_count() or 1) // request.workers),
    )  # fmt: skip


def parse_token_budgets(text: str) -> dict[str, int]:
    """``3k,6k``: vision tokens per layer, by what was typed. Raises UserError."""
    budgets = {part: parse_count(part) for part in filter(None, (part.strip() for part in text.split(",")))}
    if not budgets or not all(0 < tokens < math.inf for tokens in budgets.values()):
        raise UserError(f"--budget {text}: give vision tokens per layer, like 6k or 3k,6k")
    return budgets


def judge_of(url: str | None, model: str | None) -> Judge | None:
    """The judge that was named, if one was. Raises UserError for half of one."""
    if url is None and model is None:
        return None
    if not url or not model:
        raise UserError("a judge takes both --judge-url URL and --judge-model NAME; give both or neither")
    return Judge(url, model)


def _submit(outcome: SuiteResults) -> None:
    """Write what the benchmark's server takes beside the journal, where it takes something."""
    submission, out = suite_of(outcome.job.suite).submission, outcome.job.out
    if submission is None or out is None:
        return
    for run, records in outcome.records.items():
        path = out.with_name(f"{out.stem}.{re.sub(r'[^A-Za-z0-9._-]', '-', f'{run.label}.{run.budget}')}.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(submission(records))
        to_stderr(f"submission: {path}")


@contextmanager
def _progress() -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    with progress_bar() as bar:
        yield bar
