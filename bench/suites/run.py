"""A run of a suite: every video once, what the journal has already left out, then the judge."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from edgevlm import __version__
from edgevlm.bench.suites import suite_of
from edgevlm.bench.suites.dataset import Dataset
from edgevlm.bench.suites.fields import shown
from edgevlm.bench.suites.judge import Judge
from edgevlm.bench.suites.records import VERDICT, answer_key, key_of, labels_of, whole
from edgevlm.bench.suites.schema import SuiteQuestion
from edgevlm.bench.suites.scoring import Record
from edgevlm.bench.suites.worker import VideoSettings, VideoTask, VideoWorker, identity, room_for, seat, workers_that_fit
from edgevlm.calib.accuracy.journal import Journal, Key
from edgevlm.calib.accuracy.variants import FULL, Run, SkippedRun, Variant, reason_of
from edgevlm.calib.accuracy.worker import map_workers
from edgevlm.errors import UserError
from edgevlm.runtime.model import Model

Progress = Callable[[str, int, int], None]  # what is being done, how many are, of how many
WHOLE = "all"  # the budget of full KV


@dataclass(frozen=True, slots=True)
class Job:
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
    workers: int = 1
    threads: int | None = 1


@dataclass(frozen=True, slots=True)
class SuiteResults:
    """records: of each run, question by question, with a judge's verdict where there is one; missing: videos."""

    job: Job
    data: Dataset
    questions: list[SuiteQuestion]
    runs: list[Run]
    skipped: list[SkippedRun]
    records: dict[Run, list[Record]]


def read_questions(suite: str, data: Dataset) -> list[SuiteQuestion]:
    """All questions of a data folder. Raises UserError where there is none, or none whose video is there."""
    questions = list(suite_of(suite).read(data))
    if not questions:
        first = f"; the first: {data.findings[0]}" if data.findings else ""
        raise UserError(f"--data {data.root}: holds no question that can be read{first}; see docs/benchmarks.md")
    if all(question.video in data.missing for question in questions):
        lacking = f"none of {len(data.missing)} videos is there, {shown(questions[0].video)} for one"
        raise UserError(f"--data {data.root}: {lacking}; see docs/benchmarks.md")
    return questions


def evaluate(job: Job, progress: Progress, notice: Callable[[str], object], judge: Judge | None = None) -> SuiteResults:
    """Answer all that is not in the journal yet, then have it judged. Raises UserError."""
    data = Dataset(job.data)
    questions = read_questions(job.suite, data)
    asked = [question for question in questions if question.video not in data.missing]
    model = Model.load(job.model, threads=job.threads)
    settings = VideoSettings(job.model, job.data, job.fps, room_for(model, questions), job.threads)
    worker = VideoWorker(settings, model)
    header = {
        "edgevlm": __version__, "suite": job.suite, "model": identity(model), "fps": job.fps, "questions": _digest(questions),
        "room": asdict(settings.room),
    }  # fmt: skip
    with Journal(job.out, header, job.resume, key_of) as journal:
        found = _cells(job, worker, progress)
        runs = [run for run in found if isinstance(run, Run)]
        skipped = [skip for skip in found if isinstance(skip, SkippedRun)]
        if not runs:
            raise UserError(f"--budget: no policy can run ({skipped[0].label} at {skipped[0].budget}: {skipped[0].reason})")
        for labels in labels_of(asked):
            if key_of(labels) not in journal.records:
                journal.add(labels)
        _answer(job, worker, runs, asked, journal, progress, notice)
        if judge is not None:
            _judge(judge, runs, asked, journal, progress)
        records = {run: [_judged(journal, run, question, judge) for question in asked] for run in runs}
    return SuiteResults(job, data, questions, runs, skipped, records)


def _cells(job: Job, worker: VideoWorker, progress: Progress) -> list[Run | SkippedRun]:
    found: list[Run | SkippedRun] = []
    for number, (text, tokens) in enumerate(job.budgets.items()):
        progress("budgets of equal bytes", number, len(job.budgets))
        found += worker.runs(job.variants, text, tokens) if job.variants else []
    if job.full:
        try:
            found.append(Run(FULL, WHOLE, 0, worker.taken(Variant(FULL), 0)))
        except UserError as error:
            found.append(SkippedRun(FULL, WHOLE, reason_of(error)))
    return found


def _answer(
    job: Job, worker: VideoWorker, runs: Sequence[Run], asked: Sequence[SuiteQuestion], journal: Journal, progress: Progress,
    notice: Callable[[str], object],
) -> None:  # fmt: skip
    tasks = tasks_of(asked, runs, journal.records)
    videos = len(dict.fromkeys(question.video for question in asked))
    workers = job.workers
    if workers > 1:
        workers = workers_that_fit(workers, _bytes_of_a_worker(worker, runs))
        if workers < job.workers:
            notice(f"{workers} of {job.workers} workers: the free memory has room for no more")
    progress("videos", videos - len(tasks), videos)
    for number, records in enumerate(map_workers(worker.perform, partial(seat, worker.settings), tasks, workers)):
        for record in records:
            if not answered(journal.records.get(key_of(record))):
                journal.add(record)
        progress("videos", videos - len(tasks) + number + 1, videos)


def _bytes_of_a_worker(worker: VideoWorker, runs: Sequence[Run]) -> int:
    """A model like the one that is loaded here, mapped and packed, and a session a run."""
    files = sum(path.stat().st_size for path in worker.model.bundle.path.iterdir() if path.is_file())
    return 2 * files + sum(run.allowed for run in runs)


def tasks_of(asked: Sequence[SuiteQuestion], runs: Sequence[Run], known: dict[Key, Record]) -> list[VideoTask]:
    """A task a video that lacks answers, in the order of the files; with the runs that lack any."""
    videos: dict[str, list[SuiteQuestion]] = {}
    for question in asked:
        videos.setdefault(question.video, []).append(question)
    tasks = []
    for video, questions in videos.items():
        lacking = [run for run in runs if not all(answered(known.get(answer_key(run, question))) for question in questions)]
        if lacking:
            tasks.append(VideoTask(video, tuple(questions), tuple(lacking)))
    return tasks


def answered(record: Record | None) -> bool:
    """Whether an answer need not be had again; one that a damaged video prevented is tried again."""
    return record is not None and not record["damaged"]


def _judge(judge: Judge, runs: Sequence[Run], asked: Sequence[SuiteQuestion], journal: Journal, progress: Progress) -> None:
    """Have each open answer judged that has no verdict by this judge yet."""
    todo = []
    for run in runs:
        for question in asked:
            record = journal.records[answer_key(run, question)]
            key = (VERDICT, run.label, run.budget, question.id, judge.model)
            if record["scoring"] == "judge" and not record["error"] and key not in journal.records:
                todo.append(record)
    for number, record in enumerate(todo):
        progress("verdicts", number, len(todo))
        verdict = judge.verdict(record["question"], record["answer"], record["response"])
        names = {name: record[name] for name in ("policy", "budget", "record")}
        journal.add({"kind": VERDICT, **names, "judge": judge.model, **asdict(verdict)})
    progress("verdicts", len(todo), len(todo))


def _judged(journal: Journal, run: Run, question: SuiteQuestion, judge: Judge | None) -> Record:
    """An answer, whole, with its verdict: ``verdict`` and ``rating``."""
    record = whole(journal.records[answer_key(run, question)], journal.records)
    said = journal.records.get((VERDICT, run.label, run.budget, question.id, judge.model)) if judge else None
    return record | {"verdict": said["right"], "rating": said["rating"]} if said else record


def _digest(questions: Sequence[SuiteQuestion]) -> str:
    """Of what is asked; where the videos lie is not part of it."""
    return hashlib.sha256("\n".join(repr(replace(question, video="")) for question in questions).encode()).hexdigest()[:16]
