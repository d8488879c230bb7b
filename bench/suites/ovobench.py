"""OVO-Bench (Li et al., 2025, arXiv:2501.05510): questions about before, about now, and ones that must wait."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from edgevlm.bench.suites.dataset import Dataset, SuiteQuestion
from edgevlm.bench.suites.fields import Fields, Malformed, listed, shown
from edgevlm.bench.suites.scoring import Column, Suite, SuiteScores, mean

TASKS = {
    "Real-time": ("OCR", "ACR", "ATR", "STU", "FPD", "OJR"),
    "Backward": ("EPM", "ASI", "HLD"),
    "Forward": ("REC", "SSR", "CRR"),
}
CATEGORIES = {task: category for category, tasks in TASKS.items() for task in tasks}

CHOICE = """Question: {question}
Options:
{options}

Respond only with the letter corresponding to your chosen option (e.g., A, B, C)."""
COUNT = """People in this video may do the following again and again: {activity}. Count how many times it has been done so \
far, by whomever; a complete motion counts as one.
Respond only with a single number."""
STEP = """The video is a tutorial. One of its steps is: {step}
Is this step being performed right now?
Answer only with "Yes" or "No"."""
CLUE = """{question}
Does what has been seen so far, its newest frames above all, give enough information to answer this question?
Answer only with "Yes" or "No"."""


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("ovo_bench_new.json", "data/ovo_bench_new.json", "ovo_bench*.json")[0]
    yield from data.each(file, data.read(file), partial(_record, data, file))


def _record(data: Dataset, file: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    task = fields.text("task")
    if task not in CATEGORIES:
        raise Malformed(f"task is {shown(task)}, not one of {', '.join(CATEGORIES)}")
    video = data.video(fields.text("video"), "src_videos", "data/src_videos")
    name = f"{file}:{place}"
    if CATEGORIES[task] != "Forward":
        options, text = fields.options("options"), fields.text("question")
        yield SuiteQuestion(
            id=name, video=video, text=text, prompt=CHOICE.format(question=text, options=listed(options)),
            answer=fields.letter_at("gt", options), scoring="letter-within", subtask=task, category=CATEGORIES[task],
            options=options, time_s=fields.seconds("realtime"),
        )  # fmt: skip
        return
    text = fields.text("question") if task == "CRR" else fields.text("activity" if task == "REC" else "tutorial")

    def make(asked: Fields, at: str) -> Iterator[SuiteQuestion]:
        yield _forward(f"{file}:{at}", task, video, text, asked)

    yield from data.each(file, fields.list("test_info", least=1), make, f"{place}/")


def _forward(name: str, task: str, video: str, text: str, asked: Fields) -> SuiteQuestion:
    if task == "REC":
        prompt, answer, scoring = COUNT.format(activity=text), str(asked.integer("count")), "digits"
    else:
        kind = asked.integer("type")
        if kind not in (0, 1):
            raise Malformed(f"type is {kind}, not 0 or 1")
        prompt = STEP.format(step=asked.text("step")) if task == "SSR" else CLUE.format(question=text)
        text = asked.text("step") if task == "SSR" else text
        answer, scoring = ("No", "Yes")[kind], "yes-no"
    return SuiteQuestion(
        id=name, video=video, text=text, prompt=prompt, answer=answer, scoring=scoring, subtask=task, category="Forward",
        time_s=asked.seconds("realtime"),
    )  # fmt: skip


def columns(scores: SuiteScores) -> Iterator[Column]:
    """Tasks, the mean of each category's tasks, and the mean of the three."""
    categories = []
    for category, names in TASKS.items():
        tasks = list(scores.accuracies({name: name for name in names}, category))
        if tasks:
            categories.append(mean(category.lower(), f"{category}, mean of tasks", tasks))
            yield from (*tasks, categories[-1])
    yield mean("all", "Overall, mean of categories", categories)


SUITE = Suite("OVO-Bench", read, columns)
