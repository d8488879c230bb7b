"""StreamingBench (Lin et al., 2024, arXiv:2411.03628): questions in the middle of a stream, in sequence, and proactive ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from edgevlm.bench.suites.dataset import Dataset, Poll, SuiteQuestion
from edgevlm.bench.suites.fields import LETTERS, Fields, listed
from edgevlm.bench.suites.scoring import Column, Suite, SuiteScores

REAL, OMNI, CONTEXTUAL = "Real-time visual", "Omni-source", "Contextual"
HEADS = {
    REAL: {
        "Object Perception": "OP", "Causal Reasoning": "CR", "Clips Summarize": "CS", "Attribute Perception": "ATP",
        "Event Understanding": "EU", "Text-Rich Understanding": "TR", "Prospective Reasoning": "PR",
        "Spatial Understanding": "SU", "Action Perception": "ACP", "Counting": "CT",
    },
    OMNI: {
        "Emotion Recognition": "ER", "Scene Understanding": "SCU", "Source Discrimination": "SD", "Multimodal Alignment": "MA",
    },
    CONTEXTUAL: {
        "Anomaly Context Understanding": "ACU", "Misleading Context Understanding": "MCU",
        "Sequential Question Answering": "SQA", "Proactive Output": "PO",
    },
}  # fmt: skip
SHORT = {REAL: "real", OMNI: "omni", CONTEXTUAL: "context"}
CATEGORIES = {task: category for category, tasks in HEADS.items() for task in tasks}
PARTS = {"real": REAL, "omni": OMNI, "sqa": CONTEXTUAL, "proactive": CONTEXTUAL}

CHOICE = """{before}Answer this multiple-choice question about the video. Respond with only the letter (A, B, C, or D) of the \
correct option.

Question: {question}

Options:
{options}

The best option is:"""
POLLED = '{question} Is it the right time to output "{output}"? You can only answer yes or no.'
POLLED_ON_S = 4.0  # after the moment itself


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    patterns = [f"{folder}questions_{part}*.json" for folder in ("", "src/data/", "data/") for part in PARTS]
    for file in _one_of_each(data.files(*patterns)):
        earlier: dict[str, list[str]] = {}
        for within, records in _lists(data.read(file)):
            yield from data.each(file, records, partial(_record, data, file, earlier), within)


def _one_of_each(files: list[str]) -> list[str]:
    """A part may be there twice, record by record and as ``_stream``, grouped by video: the same questions."""
    chosen: dict[str, str] = {}
    for file in sorted(files, key=lambda file: ("_stream" in file, file)):
        chosen.setdefault(_part(file), file)
    return list(chosen.values())


def _part(file: str) -> str:
    name = file.rpartition("/")[2]
    return next(part for part in PARTS if name.startswith(f"questions_{part}"))


def _lists(values: Any) -> Iterator[tuple[str, Any]]:
    """The records, with the place of their list: one list, or a list of lists as in the sequential part."""
    if isinstance(values, list) and values and all(isinstance(value, list) for value in values):
        for index, value in enumerate(values):
            yield f"{index}/", value
    else:
        yield "", values


def _record(data: Dataset, file: str, earlier: dict[str, list[str]], fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    video = data.video(fields.text("video_path"))
    part = _part(file)
    told = earlier.setdefault(video, [])

    def make(asked: Fields, at: str) -> Iterator[SuiteQuestion]:
        if part == "proactive":
            yield _proactive(f"{file}:{at}", video, asked)
        else:
            yield _choice(f"{file}:{at}", video, asked, part, told)

    yield from data.each(file, fields.list("questions"), make, f"{place}/")


def _choice(name: str, video: str, asked: Fields, part: str, told: list[str]) -> SuiteQuestion:
    options = asked.options("options")
    answer, text, task = asked.letter("answer", options), asked.text("question"), asked.text("task_type")
    before = ""
    if part == "sqa":
        before = "Questions so far, with their answers:\n" + "\n".join(told) + "\n\n" if told else ""
        told.append(f"At {asked.text('time_stamp')}: {text} {options[LETTERS.index(answer)]}")
    return SuiteQuestion(
        id=name, video=video, text=text, answer=answer, scoring="first-letter", subtask=task,
        prompt=CHOICE.format(before=before, question=text, options=listed(options)),
        category=CATEGORIES.get(task, PARTS[part]), options=options, time_s=asked.seconds("time_stamp"),
    )  # fmt: skip


def _proactive(name: str, video: str, asked: Fields) -> SuiteQuestion:
    text, output = asked.text("question"), asked.text("ground_truth_output")
    start, due = asked.seconds("time_stamp"), asked.seconds("ground_truth_time_stamp")
    poll = Poll(POLLED.format(question=text, output=output), due + POLLED_ON_S, due)
    return SuiteQuestion(
        id=name, video=video, text=text, prompt=text, answer=output, scoring="proactive", subtask="Proactive Output",
        category=CONTEXTUAL, time_s=start + 1, poll=poll, tokens=64,
    )  # fmt: skip


def columns(scores: SuiteScores) -> Iterator[Column]:
    """Tasks, then their category's fraction of all its questions; all questions last, as Table 2 has them."""
    for category, heads in HEADS.items():
        tasks = list(scores.accuracies(heads, category))
        if tasks:
            yield from tasks
            yield scores.accuracy(SHORT[category], category, category=category)
    yield scores.accuracy("all", "Overall")


SUITE = Suite("StreamingBench", read, columns)
