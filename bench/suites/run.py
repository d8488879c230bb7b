"""Run ``edgevlm bench accuracy`` on a published suite. Questions that have a saved answer are not asked again."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.bench.accuracy.command import exit_if_skipped
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

PROMPT_PARTS = 4  # a prompt may take 1 / PROMPT_PARTS of a model's positions
NAMED = 5
LEFT_OUT = {  # field of the report's last line -> the words printed before the field's entries
    "missing_videos": "missing",
    "malformed": "malformed and skipped",
    "unanswered": "not answered",
}


def run_suite(
    suite: str, model: str, policy: list[str], budget: str, data: Path | None, fps: float, engine: str, as_json: bool,
    out: Path | None, resume: bool, workers: int, **_: Any,
) -> None:  # fmt: skip
    """Ask the questions that have no saved answer, and print the results, skipped policies and bad data. Raises UserError."""
    if data is None or not data.is_dir():
        raise UserError(f"--suite {suite}: the data folder is missing; add --data DIR ({GUIDE})")
    named, variants = [name for text in policy for name in split(text)], parse_variants(policy)
    if "all" not in named and any(variant.is_oracle for variant in variants):
        raise UserError("--policy oracle: is supported only in the demo world (--suite streamqa); remove it")
    variants = [variant for variant in variants if not variant.is_oracle]
    budgets = {part: parse_budget(part) for part in filter(None, (part.strip() for part in budget.split(",")))}
    if not budgets or not all(0 < tokens < math.inf for tokens in budgets.values()):
        raise UserError(f"--budget {budget}: give vision tokens per layer, such as 6k or 3k,6k")
    with progress("loading the model") as step:
        folder = resolve_model(model, step, to_stderr)
        source, threads = Dataset(data), max(1, (os.cpu_count() or 1) // workers)
        questions = list(FORMATS[suite].read(source))
        asked = [question for question in questions if question.video not in source.missing]
        if not asked:
            first = next(iter([*source.findings, *(f"video {video} not found" for video in source.missing)]), "no records")
            raise UserError(f"--data {data}: has no usable questions ({first}); see {GUIDE}")
        loaded = Model.load(folder, engine=engine, threads=threads)
        settings = VideoSettings(folder, data, fps, text_budget_for(loaded, questions), threads, engine)
        worker = VideoWorker(settings, loaded)
        digest = hashlib.sha256("\n".join(repr(replace(question, video="")) for question in questions).encode()).hexdigest()
        header = {
            "journal": "edgevlm bench accuracy", "edgevlm": __version__, "suite": suite, "model": model_identity(loaded),
            "fps": fps, "questions": digest[:16], "text_budget": asdict(settings.text_budget),
        }  # fmt: skip
        with JsonLines(out, header, key_of, resume=resume) as journal:
            step("budgets of equal bytes", 0, 1)
            tried = list(_runs(worker, variants, budgets, FULL in named))
            runs = [run for run in tried if isinstance(run, VariantRun)]
            skipped = [skip for skip in tried if isinstance(skip, SkippedRun)]
            if not runs:
                raise UserError(f"--budget: no policy can run ({skipped[0].label} at {skipped[0].budget}: {skipped[0].reason})")
            _answer(workers, worker, runs, asked, journal, step)
    records = {run: [journal.records[run.label, run.budget, question.id] for question in asked] for run in runs}
    table = Table(as_json)
    table.print_all(report(suite, fps, records, skipped))
    missing = [skip.label for skip in skipped]
    last = {"bench": "accuracy", "suite": suite, "questions": len(questions), **counts(source, records)}
    if as_json:
        table.print(last)
        exit_if_skipped(policy, missing)
        return
    for name, words in LEFT_OUT.items():
        if of := last[name]:
            each = [one if isinstance(one, str) else " ".join(map(str, one.values())) for one in of]
            more = f"; {len(of) - NAMED} more, with --json" if len(of) > NAMED else ""
            table.say(f"{words}: {len(of)}: {'; '.join(each[:NAMED])}{more}")
    exit_if_skipped(policy, missing)


def key_of(record: Record) -> tuple[str, str, str]:
    return record["policy"], record["budget"], record["record"]


def text_budget_for(model: Model, questions: Sequence[SuiteQuestion]) -> TextBudget:
    """Return a text budget that fits the longest prompt and the longest answer, up to a fraction of the model's positions."""
    chat, most = Chat(model.bundle.chat, model.tokenizer), model.bundle.limit // PROMPT_PARTS
    longest = 0
    for prompt in {part for q in questions for part in (q.prompt, q.poll.prompt if q.poll else q.prompt)}:
        try:
            longest = max(longest, len(chat.suffix([], prompt)))
        except UserError:  # an invalid prompt is recorded when the question is asked
            continue
    return TextBudget(0, min(longest, most), min(max(question.tokens for question in questions), most))


def _runs(
    worker: VideoWorker, variants: Sequence[Variant], budgets: dict[str, int], full: bool
) -> Iterator[VariantRun | SkippedRun]:
    for text, tokens in budgets.items() if variants else ():
        yield from worker.runs(variants, text, tokens)
    if full:
        try:
            yield VariantRun(FULL, "all", 0, worker.peak_bytes(Variant(FULL), 0))
        except UserError as error:
            yield SkippedRun(FULL, "all", reason_of(error))


def _answer(
    workers: int, worker: VideoWorker, runs: Sequence[VariantRun], asked: Sequence[SuiteQuestion],
    journal: JsonLines, step: Report,
) -> None:  # fmt: skip
    """Show each video to the runs that still have questions about it, and save their answers in the journal."""
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
    """Return whether the journal has a question's result. A question that failed because of a damaged video is asked again."""
    return record is not None and not record["damaged"]


def report(suite: str, fps: float, records: dict[VariantRun, list[Record]], skipped: Sequence[SkippedRun]) -> Iterator[Line]:
    """Yield each run's results as columns, then the skipped runs."""
    head = {"bench": "accuracy", "suite": suite}
    for run, answers in records.items():
        about = {**head, "policy": run.label, "budget": run.budget, "tokens": run.tokens or None}
        most = max(record["bytes"] for record in answers)
        for column in FORMATS[suite].columns(Scores(answers)):
            rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in column.items()}
            yield {**about, **rounded, "fps": fps, "bytes": most}
    for skip in skipped:
        yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}


def counts(data: Dataset, records: dict[VariantRun, list[Record]]) -> Line:
    """Count questions and videos, and list the records, videos and answers that are left out of the results."""
    first = next(iter(records.values()))
    errors = [record for of in records.values() for record in of if record["error"]]
    return {
        "asked": len(first), "videos": len({record["video"] for record in first}),
        "malformed": data.findings, "missing_videos": list(data.missing),
        "unanswered": [{name: each[name] for name in ("record", "policy", "budget", "video", "error")} for each in errors],
    }  # fmt: skip
