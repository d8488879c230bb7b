"""``bench accuracy --suite longstream --journal``: what a journal adds to a memory, at equal bytes.

The demo model writes a line as it watches, its answer to a question that it was taught. A question gets the lines that share
its words as earlier turns, the one text of before that this model was taught to see. What a reader would find in them is
counted beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgevlm.apps.journal import Journal, Line
from edgevlm.bench.accuracy.report import BACKWARD, NOW, UNSEEN
from edgevlm.bench.schemas import bench_line
from edgevlm.calib.accuracy.cases import LONGSTREAM, Case, CaseQuestion
from edgevlm.calib.accuracy.memory_accounting import bytes_per_token
from edgevlm.calib.accuracy.variants import Budget, SkippedRun, Variant, VariantRun, parse_tokens, parse_variants
from edgevlm.calib.accuracy.worker import TEXT_BUDGET, AccuracySettings, Worker, policy_of
from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.world import COLORS, SHAPES
from edgevlm.calib.intervals import difference, fraction_right
from edgevlm.errors import UserError
from edgevlm.progress import Report, progress
from edgevlm.runtime.session import Session

PROMPT = "what left last?"
EVERY = 4  # frames from line to line; one that says what the one before says is left out
LINES = 2  # before a question: the model was taught turns by threes
BYTES = 64 << 10  # of the journal's file, which the memory has less

Answers = dict[str, list[list[bool]]]  # by kind, whether each is right, a list a stream


@dataclass
class JournalScores:
    """Of one policy at one budget: answers of the memory alone, with the journal's lines, and what stands in the lines."""

    alone: Answers = field(default_factory=dict)
    noted: Answers = field(default_factory=dict)
    found: Answers = field(default_factory=dict)
    bytes: int = 0
    noted_bytes: int = 0  # the journal's file included
    lines: int = 0

    def add(self, kind: str, stream: int, alone: bool, noted: bool, found: bool) -> None:
        for answers, right in ((self.alone, alone), (self.noted, noted), (self.found, found)):
            clusters = answers.setdefault(kind, [])
            clusters += [[] for _ in range(stream + 1 - len(clusters))]
            clusters[stream].append(right)


def run_journal(settings: AccuracySettings, policies: list[str], budget: str, streams: int, as_json: bool) -> str:
    """The table, or JSON lines. Raises UserError."""
    if settings.suite != LONGSTREAM:
        raise UserError(f"--journal: give --suite {LONGSTREAM}")
    variants = [variant for variant in parse_variants(policies) if not variant.is_oracle]
    with progress("loading the model") as step:
        lines = list(measure_journal(settings, variants, parse_tokens(budget), streams, step))
    return "\n".join(map(bench_line if as_json else describe, lines))


def describe(line: dict[str, Any]) -> str:
    """A line for people."""
    head = f"{line['policy']:<16}{line['budget']:>5}  "
    if "skipped" in line:
        return f"{head}skipped: {line['skipped']}"
    gain = "" if line["difference"] is None else " ({difference:+.3f} [{difference_low:+.2f}, {difference_high:+.2f}])"
    shown = "{kind:<12}{questions:>4} asked, {accuracy:.3f} right, {with_journal:.3f} with the journal" + gain
    return head + (shown + ", {in_journal:.3f} in its lines").format(**line)


def measure_journal(
    settings: AccuracySettings, variants: list[Variant], budgets: list[Budget], streams: int, step: Report
) -> Iterator[dict[str, Any]]:
    """A line for each policy, budget and kind of question. Raises UserError."""
    worker = Worker(settings)
    less = -(-BYTES // bytes_per_token(worker.model.bundle))
    for budget in budgets:
        for run in worker.runs(variants, budget):
            head = {"bench": "accuracy-journal", "suite": settings.suite, "policy": run.label, "budget": run.budget}
            if isinstance(run, SkippedRun) or run.tokens - less < worker.per_frame:
                reason = run.reason if isinstance(run, SkippedRun) else "the journal leaves it less than a frame"
                yield {**head, "skipped": reason}
                continue
            scores = JournalScores()
            for stream in range(streams):
                step(f"{run.label} at {run.budget}", stream, streams)
                add_stream(worker, run, less, stream, scores)
            for kind in scores.alone:
                right = fraction_right(scores.alone[kind])
                with_journal, found = (fraction_right(of[kind]) for of in (scores.noted, scores.found))
                gain = difference(scores.noted[kind], scores.alone[kind]) if streams > 1 else None
                yield {
                    **head, "kind": kind, "streams": right.clusters, "questions": right.count, "frames": settings.frames,
                    "seed": settings.seed, "accuracy": right.value, "ci_low": right.low, "ci_high": right.high,
                    "with_journal": with_journal.value, "in_journal": found.value, "difference": gain and gain.value,
                    "difference_low": gain and gain.low, "difference_high": gain and gain.high, "tokens": run.tokens,
                    "bytes": scores.bytes, "journal_tokens": run.tokens - less, "journal_bytes": scores.noted_bytes,
                    "lines": scores.lines / streams,
                }  # fmt: skip


def add_stream(worker: Worker, run: VariantRun, less: int, stream: int, scores: JournalScores) -> None:
    """Watch a stream twice, without a journal and with one, and ask everything."""
    case = worker.case(stream)
    with TemporaryDirectory(prefix="edgevlm-") as folder, closing(Journal(Path(folder), days=1e6, cap=BYTES)) as journal:
        alone, own = watch_and_ask(worker, run, run.tokens, case)
        noted, with_journal = watch_and_ask(worker, run, run.tokens - less, case, journal)
        scores.bytes = max(scores.bytes, own)
        scores.noted_bytes = max(scores.noted_bytes, with_journal + (Path(folder) / Journal.FILE).stat().st_size)
        scores.lines += len(journal.query(limit=1_000_000))
        found = [is_found(question, relevant(journal, question)) for question in case.questions]
    for question, *right in zip(case.questions, alone, noted, found, strict=True):
        for kind in kinds_of(question):
            scores.add(kind, stream, *right)


def watch_and_ask(
    worker: Worker, run: VariantRun, tokens: int, case: Case, journal: Journal | None = None
) -> tuple[list[bool], int]:
    """Whether each answer is right, and the bytes of cache and policy. A journal gets a line every so many frames."""
    variant, said = Variant(run.label), ""
    with Session.open(
        worker.model, policy=policy_of(variant, worker.model, tokens), budget=tokens, reindexing=variant.reindexing,
        text_budget=TEXT_BUDGET, append=variant.append, encode=variant.encode,
    ) as session:  # fmt: skip
        for number, frame in enumerate(case.frames, 1):
            session.watch(frame)
            if journal is not None and number % EVERY == 0:
                text = session.ask(PROMPT).text.strip()
                if text != said:
                    journal.add(Line("demo", float(number), text))
                said = text
        session.flush()
        stats = session.stats
        turns = [[(PROMPT, line) for line in relevant(journal, question)] for question in case.questions]
        answers = [
            question.is_right(session.ask(question.text, history=told).text.strip())
            for question, told in zip(case.questions, turns, strict=True)
        ]
    return answers, stats.cache_bytes + stats.policy_bytes + stats.present_bytes


def relevant(journal: Journal | None, question: CaseQuestion) -> list[str]:
    """The lines that stand before a question."""
    return [line.text for line in journal.relevant(question.text, None, None, "demo", LINES)] if journal else []


def kinds_of(question: CaseQuestion) -> list[str]:
    """Its kind, and whether that is about now, about what was shown before, or about what never was."""
    group = NOW if question.is_about_now else UNSEEN if question.last is None else BACKWARD
    return [question.kind, group]


def is_found(question: CaseQuestion, lines: list[str]) -> bool:
    """Whether somebody who reads the lines, and nothing else, has the answer."""
    asked = demo.parse(question.text)
    if asked is None or asked.shape is None:
        return False
    shape = SHAPES[asked.shape]
    if question.kind == "past_seen":
        return question.is_right("yes" if any(f"{COLORS[asked.color or 0]} {shape}" in line for line in lines) else "no")
    return question.kind == "past_color" and any(f"{question.answer} {shape}" in line for line in lines)
