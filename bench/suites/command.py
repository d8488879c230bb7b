"""``edgevlm bench accuracy`` of a published suite: from what was typed to the report."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.apps.sources.base import SLOWEST_FPS
from edgevlm.bench.accuracy.command import resume_hint
from edgevlm.bench.output import Line, Table
from edgevlm.bench.suites.dataset import GUIDE
from edgevlm.bench.suites.fields import shown
from edgevlm.bench.suites.formats import FORMATS
from edgevlm.bench.suites.judge import Judge
from edgevlm.bench.suites.run import SuiteJob, SuiteResults, evaluate
from edgevlm.bench.suites.scoring import Column, Record, ScoredAnswer, SuiteScores, marks_of
from edgevlm.calib.accuracy.pools import Processes
from edgevlm.calib.accuracy.variants import FULL, VariantRun, parse_variants, split
from edgevlm.errors import UserError
from edgevlm.progress import progress, to_stderr
from edgevlm.runtime.settings import parse_budget

NAMED = 5  # of a list that is longer, on the report for people


def run_published(job: SuiteJob, judge: Judge | None, as_json: bool) -> None:
    """Run to the end and print the report. Raises UserError."""
    if judge is not None and job.out is None:
        to_stderr("note: without --out the judge's verdicts are kept nowhere")
    with progress("loading the model") as step, resume_hint(job.out):
        results = evaluate(job, step, step.print, judge)
    table, count = Table(as_json), counts(results)
    for line in lines(results):
        printable = {name: shown(value) if isinstance(value, str) else value for name, value in line.items()}
        table.print(line if as_json else printable)
    if as_json:
        table.print({"bench": "accuracy", "suite": job.suite, **count})
    else:
        print("\n".join(_left_out(count)))


def job_of(
    suite: str, data: Path | None, model: str, policies: list[str], budget: str, fps: float, out: Path | None, resume: bool,
    pool: Processes,
) -> SuiteJob:  # fmt: skip
    """What to run, from what was typed. Raises UserError for what cannot be."""
    if data is None:
        raise UserError(f"--suite {suite}: name the folder of its data with --data DIR ({GUIDE})")
    if not data.is_dir():
        raise UserError(f"--data {data}: is not a folder; give the one that the benchmark was downloaded to")
    if not SLOWEST_FPS <= fps <= 1000:
        raise UserError(f"--fps {fps:g}: give frames a second, from {SLOWEST_FPS:g} to 1000")
    variants = parse_variants(policies)
    named = [name for text in policies for name in split(text)]
    if any(variant.is_oracle for variant in variants) and "all" not in named:
        raise UserError("--policy oracle: is known of the demo world alone (--suite streamqa); leave it out")
    return SuiteJob(
        suite=suite, data=data, model=resolve_model(model, lambda *told: None, to_stderr), fps=fps,
        variants=[variant for variant in variants if not variant.is_oracle], budgets=parse_token_budgets(budget),
        full=FULL in named, out=out, resume=resume, pool=pool,
        threads=max(1, (os.cpu_count() or 1) // pool.workers),
    )  # fmt: skip


def parse_token_budgets(text: str) -> dict[str, int]:
    """``3k,6k``: vision tokens per layer, by what was typed. Raises UserError."""
    budgets = {part: parse_budget(part) for part in filter(None, (part.strip() for part in text.split(",")))}
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


def columns_of(results: SuiteResults, run: VariantRun) -> list[Column]:
    """The suite's columns, from records that are scored again."""
    scores = SuiteScores(_scored(record) for record in results.records[run])
    return list(FORMATS[results.job.suite].columns(scores))


def _scored(record: Record) -> ScoredAnswer:
    return ScoredAnswer(record["video"], record["category"], record["subtask"], marks_of(record), record.get("rating"))


def lines(results: SuiteResults) -> Iterator[Line]:
    """A column of a policy at a budget each, then what was skipped."""
    head = {"bench": "accuracy", "suite": results.job.suite}
    for run in results.runs:
        most = max(record.get("bytes", 0) for record in results.records[run])
        for column in columns_of(results, run):
            of = column.estimate
            yield {
                **head, "policy": run.label, "budget": run.budget, "tokens": run.tokens or None, "column": column.head,
                "name": column.name, "rating" if column.rating else "accuracy": _rounded(column.value),
                "ci_low": _rounded(of.low if of else None), "ci_high": _rounded(of.high if of else None),
                "questions": of and of.count, "videos": of and of.clusters, "fps": results.job.fps, "bytes": most,
            }  # fmt: skip
    for skip in results.skipped:
        yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}


def counts(results: SuiteResults) -> Line:
    """What there was and what is not in the fractions: each with the names of all."""
    first = results.records[results.runs[0]] if results.runs else []
    errors = [record for records in results.records.values() for record in records if record["error"]]
    return {
        "questions": len(results.questions),
        "asked": len(first),
        "videos": len({record["video"] for record in first}),
        "unscored": sum(marks_of(record) is None and not record["error"] for record in first),
        "malformed": [{"file": one.file, "record": one.place, "reason": one.reason} for one in results.data.findings],
        "missing_videos": list(results.data.missing),
        "beyond_end": [{"record": r["record"], "video": r["video"], "late_s": r["late_s"]} for r in first if r["late_s"]],
        "unanswered": [{name: r[name] for name in ("record", "policy", "budget", "video", "error")} for r in errors],
    }


def _left_out(count: Line) -> Iterator[str]:
    if count["unscored"]:
        yield f"not scored: {count['unscored']} answers a policy, which nothing here says the truth of"
    if missing := count["missing_videos"]:
        yield f"missing: {len(missing)} videos: {_few([shown(video) for video in missing])}"
    if malformed := count["malformed"]:
        named = [f"{one['file']} record {one['record']}: {one['reason']}" for one in malformed]
        yield f"malformed: {len(malformed)} records left out: {_few(named)}"
    if late := count["beyond_end"]:
        named = [f"{one['record']} by {one['late_s']:g} s" for one in late]
        yield f"beyond the end: {len(late)} questions are timed after the end of their video, and saw all of it: {_few(named)}"
    if unanswered := count["unanswered"]:
        named = [f"{one['record']} ({one['policy']} {one['budget']}): {one['error']}" for one in unanswered]
        yield f"not answered: {len(unanswered)}: {_few(named)}"


def _few(names: list[str]) -> str:
    more = f"; {len(names) - NAMED} more, with --json" if len(names) > NAMED else ""
    return "; ".join(name if name.isprintable() else ascii(name) for name in names[:NAMED]) + more


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
