"""``edgevlm bench accuracy`` of a published suite: every video once, what the journal lacks, then the judge and the report."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.bench.output import Table
from edgevlm.bench.suites import GUIDE
from edgevlm.bench.suites.formats import FORMATS
from edgevlm.bench.suites.records import Dataset, SuiteQuestion
from edgevlm.bench.suites.scoring import Line, Record, Scores
from edgevlm.bench.suites.viewing import VideoSettings, VideoTask, VideoWorker
from edgevlm.calib.accuracy.pools import in_processes
from edgevlm.calib.accuracy.variants import FULL, SkippedRun, Variant, VariantRun, parse_variants, reason_of, split
from edgevlm.calib.accuracy.worker import model_identity
from edgevlm.errors import UserError
from edgevlm.progress import Report, progress, to_stderr
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.files import JsonLines
from edgevlm.runtime.model import Model
from edgevlm.runtime.settings import parse_budget

PROMPT_PARTS = 4  # a prompt may take one part in so many of a model's positions
NAMED = 5  # of the records left out, on the report for people
LEFT_OUT = {  # of the last line, with the words before a record's fields
    "missing_videos": "missing",
    "malformed": "malformed, and left out",
    "unanswered": "not answered",
}


@dataclass(frozen=True, slots=True)
class SuiteJob:
    """What to run. budgets: vision tokens per layer, by what was typed; full: also full KV."""

    suite: str
    data: Path
    model: str
    variants: list[Variant]
    budgets: dict[str, int]
    full: bool
    fps: float
    out: Path | None
    resume: bool
    workers: int


def run_suite(
    suite: str, model: str, policy: list[str], budget: str, data: Path | None, fps: float, as_json: bool, out: Path | None,
    resume: bool, workers: int, **_: Any,
) -> None:  # fmt: skip
    """Run to the end and print the report. Raises UserError."""
    if data is None or not data.is_dir():
        raise UserError(f"--suite {suite}: give the folder that its data was downloaded to with --data DIR ({GUIDE})")
    named, variants = [name for text in policy for name in split(text)], parse_variants(policy)
    if "all" not in named and any(variant.is_oracle for variant in variants):
        raise UserError("--policy oracle: is known of the demo world alone (--suite streamqa); leave it out")
    variants = [variant for variant in variants if not variant.is_oracle]
    budgets = {part: parse_budget(part) for part in filter(None, (part.strip() for part in budget.split(",")))}
    if not budgets or not all(0 < tokens < math.inf for tokens in budgets.values()):
        raise UserError(f"--budget {budget}: give vision tokens per layer, like 6k or 3k,6k")
    with progress("loading the model") as step:
        folder = resolve_model(model, step, to_stderr)
        job = SuiteJob(suite, data, folder, variants, budgets, FULL in named, fps, out, resume, workers)
        lines = list(run_published(job, step))
    print_report(lines, as_json)


def key_of(record: Record) -> tuple[str, str, str]:
    """The policy, budget and question of a journal's record."""
    return record["policy"], record["budget"], record["record"]


def run_published(job: SuiteJob, step: Report) -> Iterator[Line]:
    """Answer the questions missing from the journal; yield columns, skipped policies and omitted records.

    Raises UserError.
    """
    data = Dataset(job.data)
    questions = list(FORMATS[job.suite].read(data))
    asked = [question for question in questions if question.video not in data.missing]
    if not asked:
        first = data.findings[0] if data.findings else f"no video is there, {next(iter(data.missing), 'nothing is named')}"
        raise UserError(f"--data {job.data}: holds no question that can be asked ({first}); see {GUIDE}")
    threads = max(1, (os.cpu_count() or 1) // job.workers)
    model = Model.load(job.model, threads=threads)
    settings = VideoSettings(job.model, job.data, job.fps, text_budget_for(model, questions), threads)
    worker = VideoWorker(settings, model)
    digest = hashlib.sha256("\n".join(repr(replace(question, video="")) for question in questions).encode()).hexdigest()
    header = {
        "journal": "edgevlm bench accuracy", "edgevlm": __version__, "suite": job.suite, "model": model_identity(model),
        "fps": job.fps, "questions": digest[:16], "text_budget": asdict(settings.text_budget),
    }  # fmt: skip
    with JsonLines(job.out, header, key_of, resume=job.resume) as journal:
        step("budgets of equal bytes", 0, 1)
        found = list(_runs(worker, job))
        runs = [run for run in found if isinstance(run, VariantRun)]
        skipped = [skip for skip in found if isinstance(skip, SkippedRun)]
        if not runs:
            raise UserError(f"--budget: no policy can run ({skipped[0].label} at {skipped[0].budget}: {skipped[0].reason})")
        _answer(job.workers, worker, runs, asked, journal, step)
    records = {run: [journal.records[run.label, run.budget, question.id] for question in asked] for run in runs}
    yield from report(job, records, skipped)
    yield {"bench": "accuracy", "suite": job.suite, "questions": len(questions), **counts(data, records)}


def text_budget_for(model: Model, questions: Sequence[SuiteQuestion]) -> TextBudget:
    """Text budget for the longest prompt, up to a part of the model's positions, and the longest answer; no conversation."""
    chat, most = Chat(model.bundle.chat), model.bundle.limit // PROMPT_PARTS
    longest = 0
    for prompt in {part for q in questions for part in (q.prompt, q.poll.prompt if q.poll else q.prompt)}:
        try:
            longest = max(longest, len(model.encode(chat.suffix([], prompt))))
        except UserError:  # it holds what stands for the video: recorded where it is asked
            continue
    return TextBudget(0, min(longest, most), min(max(question.tokens for question in questions), most))


def _runs(worker: VideoWorker, job: SuiteJob) -> Iterator[VariantRun | SkippedRun]:
    for text, tokens in job.budgets.items() if job.variants else ():
        yield from worker.runs(job.variants, text, tokens)
    if job.full:
        try:
            yield VariantRun(FULL, "all", 0, worker.peak_bytes(Variant(FULL), 0))
        except UserError as error:
            yield SkippedRun(FULL, "all", reason_of(error))


def _answer(
    workers: int, worker: VideoWorker, runs: Sequence[VariantRun], asked: Sequence[SuiteQuestion],
    journal: JsonLines, step: Report,
) -> None:  # fmt: skip
    """Do a task for each video that lacks answers, with the runs that lack any."""
    videos: dict[str, list[SuiteQuestion]] = {}
    for question in asked:
        videos.setdefault(question.video, []).append(question)
    tasks = []
    for video, of in videos.items():
        keys = {run: [(run.label, run.budget, question.id) for question in of] for run in runs}
        lacking = [run for run in runs if not all(is_answered(journal.records.get(key)) for key in keys[run])]
        if lacking:
            tasks.append(VideoTask(video, tuple(of), tuple(lacking)))
    for number, records in enumerate(in_processes(workers, worker, partial(VideoWorker, worker.settings), tasks)):
        step("videos", len(videos) - len(tasks) + number, len(videos))
        for record in records:
            if not is_answered(journal.records.get(key_of(record))):
                journal.add(record)


def is_answered(record: Record | None) -> bool:
    """Whether an answer need not be had again; one that a damaged video prevented is tried again."""
    return record is not None and not record["damaged"]


def report(job: SuiteJob, records: dict[VariantRun, list[Record]], skipped: Sequence[SkippedRun]) -> Iterator[Line]:
    """A column of a policy at a budget each, then what was skipped."""
    head = {"bench": "accuracy", "suite": job.suite}
    for run, answers in records.items():
        about = {**head, "policy": run.label, "budget": run.budget, "tokens": run.tokens or None}
        most = max(record["bytes"] for record in answers)
        for column in FORMATS[job.suite].columns(Scores(answers)):
            rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in column.items()}
            yield {**about, **rounded, "fps": job.fps, "bytes": most}
    for skip in skipped:
        yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}


def counts(data: Dataset, records: dict[VariantRun, list[Record]]) -> Line:
    """What there was and what is not in the fractions, each with the names of all."""
    first = next(iter(records.values()))
    errors = [record for of in records.values() for record in of if record["error"]]
    return {
        "asked": len(first), "videos": len({record["video"] for record in first}),
        "malformed": data.findings, "missing_videos": list(data.missing),
        "unanswered": [{name: each[name] for name in ("record", "policy", "budget", "video", "error")} for each in errors],
    }  # fmt: skip


def print_report(lines: Sequence[Line], as_json: bool) -> None:
    """Print the columns as a table, and the last line as a line for each kind of question left out."""
    table = Table(as_json)
    for line in lines:
        if as_json or "asked" not in line:
            table.print(line)
            continue
        for name, words in LEFT_OUT.items():
            if of := line[name]:
                each = [one if isinstance(one, str) else " ".join(map(str, one.values())) for one in of]
                more = f"; {len(of) - NAMED} more, with --json" if len(of) > NAMED else ""
                table.say(f"{words}: {len(of)}: {'; '.join(each[:NAMED])}{more}")
