"""MLVU (Zhou et al., 2024, arXiv:2406.04264): seven multiple-choice tasks, and two that are answered in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from edgevlm.bench.suites.choices import letter_for, listed, options_of
from edgevlm.bench.suites.dataset import Dataset
from edgevlm.bench.suites.fields import Fields
from edgevlm.bench.suites.schema import Suite, SuiteQuestion
from edgevlm.bench.suites.tally import Column, Tally, mean

CHOSEN = {
    "topic_reasoning": "TR", "anomaly_reco": "AR", "findNeedle": "NQA", "ego": "ER", "plotQA": "PQA", "order": "AO",
    "count": "AC",
}  # fmt: skip
OPEN = {"subPlot": "SSC", "summary": "VS"}
CHOICE_TASKS, OPEN_TASKS = "Multiple choice", "Generation"
PROMPT = """Watch the video closely: what happens and in which order, objects and how they move, people and what they do. Then \
select the best option for the question.
Question: {question}
Options:
{options}
Only give the best option.
Best option: ("""


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    for file in data.files("json/[1-9]_*.json", "[1-9]_*.json", "MLVU/json/[1-9]_*.json"):
        folder = file.rpartition("/")[2].removesuffix(".json")

        yield from data.each(file, data.read(file), partial(_record, data, file, folder))


def _record(data: Dataset, file: str, folder: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    name, text, task = f"{file}:{place}", fields.text("question"), fields.text("question_type")
    video = data.video(fields.text("video"), f"video/{folder}", f"MLVU/video/{folder}")
    if "candidates" not in fields:
        yield SuiteQuestion(
            id=name, video=video, text=text, prompt=text, answer=fields.text("answer"), scoring="judge", subtask=task,
            category=OPEN_TASKS, tokens=256,
        )  # fmt: skip
        return
    options = options_of(fields, "candidates")
    yield SuiteQuestion(
        id=name, video=video, text=text, prompt=PROMPT.format(question=text, options=listed(options, "({letter}) {text}")),
        answer=letter_for(fields, "answer", options), scoring="choice", subtask=task, category=CHOICE_TASKS, options=options,
    )  # fmt: skip


def columns(tally: Tally) -> Iterator[Column]:
    """Tasks and their mean, M-Avg; then what a judge says of the tasks of generation."""
    tasks = list(tally.shares(CHOSEN, CHOICE_TASKS))
    yield from (*tasks, mean("M-Avg", "M-Avg, mean of tasks", tasks))
    written = list(tally.shares(OPEN, OPEN_TASKS))
    if written:
        yield from (*written, tally.rating("rating", "Generation, judge's rating", OPEN_TASKS))


SUITE = Suite("MLVU", read, columns)
