"""What the journal keeps of an answer: all that it takes to score it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from edgevlm.bench.suites.schema import LETTERS, SuiteQuestion
from edgevlm.bench.suites.scoring import Record, marks_of
from edgevlm.calib.accuracy.journal import Key
from edgevlm.calib.accuracy.variants import Run

ANSWER, VERDICT, LABELS = "answer", "verdict", "labels"


def key_of(record: Mapping[str, Any]) -> Key:
    """What a line of the journal is known by: an answer, a judge's verdict on one, or a list of labels."""
    return record["kind"], record["policy"], record["budget"], record["record"], record.get("judge")


def answer_key(run: Run, question: SuiteQuestion) -> Key:
    return ANSWER, run.label, run.budget, question.id, None


def record_of(question: SuiteQuestion, run: Run, response: str, more: Mapping[str, object]) -> Record:
    """An answer. Times in seconds of the video; ``options``: the texts, or the name of a list of labels."""
    poll = question.poll
    record: Record = {
        "kind": ANSWER, "policy": run.label, "budget": run.budget, "record": question.id, "video": question.video,
        "category": question.category, "subtask": question.subtask, "question": question.text, "prompt": question.prompt,
        "options": list(question.options), "answer": question.answer, "scoring": question.scoring, "time_s": question.due_s,
        "clip": question.clip, "due_s": poll.due_s if poll else None, "triggered_s": None, "polls": 0, "frames": 0,
        "seen_until_s": None, "late_s": None, "error": None, "damaged": False, "response": response, **more,
    }  # fmt: skip
    marks = marks_of(record)
    record["marks"] = None if marks is None else list(marks)
    if len(question.options) > len(LETTERS):
        record["options"] = name_of(question.options)
    return record


@lru_cache(maxsize=64)
def name_of(labels: tuple[str, ...]) -> str:
    """By what a list of labels is known in the journal, where it stands once."""
    return hashlib.sha256("\n".join(labels).encode()).hexdigest()[:16]


def labels_of(questions: Iterable[SuiteQuestion]) -> Iterator[Record]:
    """The lists of labels that records name."""
    for labels in {question.options: None for question in questions if len(question.options) > len(LETTERS)}:
        yield {"kind": LABELS, "policy": "", "budget": "", "record": name_of(labels), "options": list(labels)}


def whole(record: Record, records: Mapping[Key, Record]) -> Record:
    """An answer of the journal with its options and no names for them."""
    options = record["options"]
    if isinstance(options, str):
        options = records[LABELS, "", "", options, None]["options"]
    return {**record, "options": options}
