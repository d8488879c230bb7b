"""A run of a suite: every video once, what the journal has already left out, then the judge."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from edgevlm import __version__
from edgevlm.bench.suites.dataset import GUIDE, Dataset, SuiteQuestion
from edgevlm.bench.suites.fields import shown
from edgevlm.bench.suites.formats import FORMATS
from edgevlm.bench.suites.judge import Judge
from edgevlm.bench.suites.scoring import Record
from edgevlm.bench.suites.viewing import ANSWER, VideoSettings, VideoTask, VideoWorker
from edgevlm.calib.accuracy.pools import HERE, Processes
from edgevlm.calib.accuracy.variants import FULL, SkippedRun, Variant, VariantRun, reason_of
from edgevlm.calib.accuracy.worker import check_same_model, model_identity
from edgevlm.errors import UserError
from edgevlm.progress import Notify, Report
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.files import JsonLines
from edgevlm.runtime.model import Model

Key = tuple[Any, ...]  # of a journal's record

VERDICT = "verdict"  # the kind of record that a judge's verdict is
ALL_TOKENS = "all"  # the budget of full KV
PROMPT_PARTS = 4  # a prompt may take one part in so many of a model's positions


@dataclass(frozen=True, slots=True)
class SuiteJob:
    """What to run. budgets: as typed, and in tokens (|M|); variants: policies, without full KV, which ``full`` adds."""

    suite: str
    data: Path
    model: str
    fps: float
    variants: list[Variant]
    budgets: dict[str, int]
    full: bool = False
    out: Path | None = None
    resume: bool = False
    pool: Processes = HERE
    threads: int | None = 1


@dataclass(frozen=True, slots=True)
class SuiteResults:
    """records: of each run, question by question, with a judge's verdict where there is one."""

    job: SuiteJob
    data: Dataset
    questions: list[SuiteQuestion]
    runs: list[VariantRun]
    skipped: list[SkippedRun]
    records: dict[VariantRun, list[Record]]


def key_of(record: Mapping[str, Any]) -> Key:
    """What a line of the journal is known by: an answer, or a judge's verdict on one."""
    return record["kind"], record["policy"], record["budget"], record["record"], record.get("judge")


def answer_key(run: VariantRun, question: SuiteQuestion) -> Key:
    return ANSWER, run.label, run.budget, question.id, None


def read_questions(suite: str, data: Dataset) -> list[SuiteQuestion]:
    """All questions of a data folder. Raises UserError where there is none, or none whose video is there."""
    questions = list(FORMATS[suite].read(data))
    if not questions:
        first = f"; the first: {data.findings[0]}" if data.findings else ""
        raise UserError(f"--data {data.root}: holds no question that can be read{first}; see {GUIDE}")
    if all(question.video in data.missing for question in questions):
        lacking = f"none of {len(data.missing)} videos is there, {shown(questions[0].video)} for one"
        raise UserError(f"--data {data.root}: {lacking}; see {GUIDE}")
    return questions


def evaluate(job: SuiteJob, progress: Report, notify: Notify, judge: Judge | None = None) -> SuiteResults:
    """Answer all that is not in the journal yet, then have it judged. Raises UserError."""
    data = Dataset(job.data)
    questions = read_questions(job.suite, data)
    asked = [question for question in questions if question.video not in data.missing]
    model = Model.load(job.model, threads=job.threads)
    settings = VideoSettings(job.model, job.data, job.fps, text_budget_for(model, questions), job.threads)
    worker = VideoWorker(settings, model)
    header = {
        "journal": "edgevlm bench accuracy", "edgevlm": __version__, "suite": job.suite, "model": model_identity(model),
        "fps": job.fps, "questions": _digest(questions), "text_budget": asdict(settings.text_budget),
    }  # fmt: skip
    with JsonLines(job.out, header, key_of, resume=job.resume) as journal:
        found = list(_runs(job, worker, progress))
        runs = [run for run in found if isinstance(run, VariantRun)]
        skipped = [skip for skip in found if isinstance(skip, SkippedRun)]
        if not runs:
            raise UserError(f"--budget: no policy can run ({skipped[0].label} at {skipped[0].budget}: {skipped[0].reason})")
        _answer(job, worker, runs, asked, journal, progress, notify)
        if judge is not None:
            _judge(judge, runs, asked, journal, progress)
        records = {run: [_judged(journal, run, question, judge) for question in asked] for run in runs}
    return SuiteResults(job, data, questions, runs, skipped, records)


def text_budget_for(model: Model, questions: Sequence[SuiteQuestion]) -> TextBudget:
    """Text budget for the longest prompt, up to a part of the model's positions, and the longest answer; no conversation."""
    chat, most = Chat(model.bundle.chat), model.bundle.limit // PROMPT_PARTS
    prompts = {question.prompt for question in questions} | {question.poll.prompt for question in questions if question.poll}
    longest = max(_length(model, chat, prompt) for prompt in prompts)
    answer = max(question.tokens for question in questions)
    return TextBudget(0, min(longest, most), min(answer, most))


def _length(model: Model, chat: Chat, prompt: str) -> int:
    try:
        return len(model.encode(chat.suffix([], prompt)))
    except UserError:  # it holds what stands for the video: said where it is asked
        return 0


def _runs(job: SuiteJob, worker: VideoWorker, progress: Report) -> Iterator[VariantRun | SkippedRun]:
    for number, (text, tokens) in enumerate(job.budgets.items()):
        progress("budgets of equal bytes", number, len(job.budgets))
        yield from worker.runs(job.variants, text, tokens) if job.variants else []
    if job.full:
        try:
            yield VariantRun(FULL, ALL_TOKENS, 0, worker.peak_bytes(Variant(FULL), 0))
        except UserError as error:
            yield SkippedRun(FULL, ALL_TOKENS, reason_of(error))


def _answer(
    job: SuiteJob, worker: VideoWorker, runs: Sequence[VariantRun], asked: Sequence[SuiteQuestion], journal: JsonLines,
    progress: Report, notify: Notify,
) -> None:  # fmt: skip
    tasks = tasks_of(asked, runs, journal.records)
    videos = len(dict.fromkeys(question.video for question in asked))
    pool = job.pool
    if pool != HERE:
        files = sum(path.stat().st_size for path in worker.model.bundle.path.iterdir() if path.is_file())
        of_a_worker = 2 * files + sum(run.allowed for run in runs)  # a model, mapped and packed, and sessions
        if (workers := workers_that_fit(wanted := pool.workers, of_a_worker)) < wanted:
            pool = Processes(workers)
            notify(f"{workers} of {wanted} workers: the free memory has room for no more")
    progress("videos", videos - len(tasks), videos)
    found = pool.map(worker.perform, partial(_perform_of_new_worker, worker.settings, model_identity(worker.model)), tasks)
    for number, records in enumerate(found, 1):
        for record in records:
            if not is_answered(journal.records.get(key_of(record))):
                journal.add(record)
        progress("videos", videos - len(tasks) + number, videos)


def _perform_of_new_worker(settings: VideoSettings, identity: str) -> Callable[[VideoTask], list[Record]]:
    worker = VideoWorker(settings)
    check_same_model(worker.model, identity)
    return worker.perform


def workers_that_fit(wanted: int, bytes_each: int) -> int:
    """As many workers as the free memory has room for, one at least."""
    return max(1, min(wanted, psutil.virtual_memory().available // max(bytes_each, 1)))


def tasks_of(asked: Sequence[SuiteQuestion], runs: Sequence[VariantRun], known: dict[Key, Record]) -> list[VideoTask]:
    """A task a video that lacks answers, in the order of the files; with the runs that lack any."""
    videos: dict[str, list[SuiteQuestion]] = {}
    for question in asked:
        videos.setdefault(question.video, []).append(question)
    tasks = []
    for video, questions in videos.items():
        lacking = [run for run in runs if not all(is_answered(known.get(answer_key(run, one))) for one in questions)]
        if lacking:
            tasks.append(VideoTask(video, tuple(questions), tuple(lacking)))
    return tasks


def is_answered(record: Record | None) -> bool:
    """Whether an answer need not be had again; one that a damaged video prevented is tried again."""
    return record is not None and not record["damaged"]


def _judge(
    judge: Judge, runs: Sequence[VariantRun], asked: Sequence[SuiteQuestion], journal: JsonLines, progress: Report
) -> None:
    """Have each open answer judged that has no verdict by this judge yet."""
    answers = [journal.records[answer_key(run, question)] for run in runs for question in asked]
    todo = [
        record for record in answers
        if record["scoring"] == "judge" and not record["error"] and _verdict_key(record, judge) not in journal.records
    ]  # fmt: skip
    for number, record in enumerate(todo):
        progress("verdicts", number, len(todo))
        verdict = judge.verdict(record["question"], record["answer"], record["response"])
        names = {name: record[name] for name in ("policy", "budget", "record")}
        journal.add({"kind": VERDICT, **names, "judge": judge.model, **asdict(verdict)})
    progress("verdicts", len(todo), len(todo))


def _verdict_key(record: Record, judge: Judge) -> Key:
    return key_of({**record, "kind": VERDICT, "judge": judge.model})


def _judged(journal: JsonLines, run: VariantRun, question: SuiteQuestion, judge: Judge | None) -> Record:
    """An answer with its options and, where there is one, its verdict: ``verdict`` and ``rating``."""
    record = {**journal.records[answer_key(run, question)], "options": question.options}
    verdict = journal.records.get(_verdict_key(record, judge)) if judge else None
    return record | {"verdict": verdict["right"], "rating": verdict["rating"]} if verdict else record


def _digest(questions: Sequence[SuiteQuestion]) -> str:
    """Of what is asked; where the videos lie is not part of it."""
    return hashlib.sha256("\n".join(repr(replace(question, video="")) for question in questions).encode()).hexdigest()[:16]
