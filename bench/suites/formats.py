"""The published benchmarks' files: how each becomes questions, and the columns of its table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from pydantic import Field

from edgevlm.bench.suites.dataset import Dataset, Poll, SuiteQuestion
from edgevlm.bench.suites.fields import (
    LETTERS,
    Clip,
    Count,
    Malformed,
    Options,
    RecordModel,
    Seconds,
    Text,
    clip_of,
    letter_of,
    listed,
)  # fmt: skip
from edgevlm.bench.suites.scoring import Column, Suite, SuiteScores, mean
from edgevlm.errors import UserError

# StreamingBench (Lin et al., 2024, arXiv:2411.03628): questions in the middle of a stream, in sequence, and proactive ones
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


class StreamingVideo(RecordModel):
    video_path: Text
    questions: list[Any]


class StreamingChoice(RecordModel):
    question: Text
    options: Options
    answer: Text
    task_type: Text
    time_stamp: Seconds


class StreamingProactive(RecordModel):
    question: Text
    ground_truth_output: Text
    time_stamp: Seconds
    ground_truth_time_stamp: Seconds


def read_streamingbench(data: Dataset) -> Iterator[SuiteQuestion]:
    """A part may be there twice, record by record and as ``_stream``, grouped by video: the same questions."""
    patterns = [f"{folder}questions_{part}*.json" for folder in ("", "src/data/", "data/") for part in PARTS]
    chosen: dict[str, str] = {}
    for file in sorted(data.files(*patterns), key=lambda file: ("_stream" in file, file)):
        name = file.rpartition("/")[2]
        chosen.setdefault(next(part for part in PARTS if name.startswith(f"questions_{part}")), file)
    for part, file in chosen.items():
        told: dict[str, list[str]] = {}
        values = data.read(file)
        is_nested = isinstance(values, list) and values and all(isinstance(value, list) for value in values)  # as sqa is
        for within, records in [(f"{index}/", value) for index, value in enumerate(values)] if is_nested else [("", values)]:
            yield from data.each(file, records, partial(streaming_video, data, file, part, told), within)


def streaming_video(
    data: Dataset, file: str, part: str, told: dict[str, list[str]], value: Any, place: str
) -> Iterator[SuiteQuestion]:
    record = StreamingVideo.model_validate(value)
    video = data.video(record.video_path)
    make = partial(_streaming_question, file, part, video, told.setdefault(video, []))
    yield from data.each(file, record.questions, make, f"{place}/")


def _streaming_question(file: str, part: str, video: str, told: list[str], value: Any, at: str) -> Iterator[SuiteQuestion]:
    if part == "proactive":
        waits = StreamingProactive.model_validate(value)
        due, output = waits.ground_truth_time_stamp, waits.ground_truth_output
        poll = Poll(POLLED.format(question=waits.question, output=output), due + POLLED_ON_S, due)
        yield SuiteQuestion(
            id=f"{file}:{at}", video=video, text=waits.question, prompt=waits.question, answer=output, scoring="proactive",
            subtask="Proactive Output", category=CONTEXTUAL, time_s=waits.time_stamp + 1, poll=poll, tokens=64,
        )  # fmt: skip
        return
    asked = StreamingChoice.model_validate(value)
    options, text, before = asked.options, asked.question, ""
    answer = letter_of(asked.answer, options)
    if part == "sqa":
        before = "Questions so far, with their answers:\n" + "\n".join(told) + "\n\n" if told else ""
        told.append(f"At {value['time_stamp']}: {text} {options[LETTERS.index(answer)]}")
    yield SuiteQuestion(
        id=f"{file}:{at}", video=video, text=text, answer=answer, scoring="first-letter", subtask=asked.task_type,
        prompt=CHOICE.format(before=before, question=text, options=listed(options)),
        category=CATEGORIES.get(asked.task_type, PARTS[part]), options=options, time_s=asked.time_stamp,
    )  # fmt: skip


def streaming_columns(scores: SuiteScores) -> Iterator[Column]:
    """Tasks, then their category's fraction of all its questions; all questions last, as Table 2 has them."""
    for category, heads in HEADS.items():
        if tasks := list(scores.accuracies(heads, category)):
            yield from tasks
            yield scores.accuracy(SHORT[category], category, category=category)
    yield scores.accuracy("all", "Overall")


# OVO-Bench (Li et al., 2025, arXiv:2501.05510): questions about before, about now, and ones that must wait
TASKS = {
    "Real-time": ("OCR", "ACR", "ATR", "STU", "FPD", "OJR"),
    "Backward": ("EPM", "ASI", "HLD"),
    "Forward": ("REC", "SSR", "CRR"),
}
OVO_CATEGORIES = {task: category for category, tasks in TASKS.items() for task in tasks}
OVO_CHOICE = """Question: {question}
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
ABOUT = {"CRR": "question", "REC": "activity", "SSR": "tutorial"}  # the field with a forward task's text


class OvoVideo(RecordModel):
    task: Text
    video: Text


class OvoChoice(RecordModel):
    question: Text
    options: Options
    gt: Count
    realtime: Seconds


class OvoForward(RecordModel):
    test_info: list[Any] = Field(min_length=1)


class OvoCount(RecordModel):
    count: Count
    realtime: Seconds


class OvoStep(RecordModel):
    type: Literal[0, 1]
    realtime: Seconds


class OvoText(RecordModel):
    text: Text


def read_ovobench(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("ovo_bench_new.json", "data/ovo_bench_new.json", "ovo_bench*.json")[0]
    yield from data.each(file, data.read(file), partial(ovo_record, data, file))


def ovo_record(data: Dataset, file: str, value: Any, place: str) -> Iterator[SuiteQuestion]:
    head = OvoVideo.model_validate(value)
    if head.task not in OVO_CATEGORIES:
        raise Malformed(f"task is {head.task}, not one of {', '.join(OVO_CATEGORIES)}")
    video, category = data.video(head.video, "src_videos", "data/src_videos"), OVO_CATEGORIES[head.task]
    if category == "Forward":
        text = OvoText.model_validate({"text": value.get(ABOUT[head.task])}).text
        make = partial(_ovo_forward, file, head.task, video, text)
        yield from data.each(file, OvoForward.model_validate(value).test_info, make, f"{place}/")
        return
    asked = OvoChoice.model_validate(value)
    if asked.gt >= len(asked.options):
        raise Malformed(f"gt is {asked.gt}, not an index of its {len(asked.options)} options")
    yield SuiteQuestion(
        id=f"{file}:{place}", video=video, text=asked.question, answer=LETTERS[asked.gt], scoring="letter-within",
        prompt=OVO_CHOICE.format(question=asked.question, options=listed(asked.options)), subtask=head.task,
        category=category, options=asked.options, time_s=asked.realtime,
    )  # fmt: skip


def _ovo_forward(file: str, task: str, video: str, text: str, value: Any, at: str) -> Iterator[SuiteQuestion]:
    if task == "REC":
        counted = OvoCount.model_validate(value)
        prompt, answer, scoring, time_s = COUNT.format(activity=text), str(counted.count), "digits", counted.realtime
    else:
        asked = OvoStep.model_validate(value)
        text = OvoText.model_validate({"text": value.get("step")}).text if task == "SSR" else text
        prompt = STEP.format(step=text) if task == "SSR" else CLUE.format(question=text)
        answer, scoring, time_s = ("No", "Yes")[asked.type], "yes-no", asked.realtime
    yield SuiteQuestion(
        id=f"{file}:{at}", video=video, text=text, prompt=prompt, answer=answer, scoring=scoring, subtask=task,
        category="Forward", time_s=time_s,
    )  # fmt: skip


def ovo_columns(scores: SuiteScores) -> Iterator[Column]:
    """Tasks, the mean of each category's tasks, and the mean of the three."""
    categories = []
    for category, names in TASKS.items():
        if tasks := list(scores.accuracies({name: name for name in names}, category)):
            categories.append(mean(category.lower(), f"{category}, mean of tasks", tasks))
            yield from (*tasks, categories[-1])
    yield mean("all", "Overall, mean of categories", categories)


# RVS-Ego and RVS-Movie (Flash-VStream, arXiv:2406.08085), in ReKV's files: open questions in the middle of a stream
RVS_FILES = {"ego4d_oe.json": "RVS-Ego", "movienet_oe.json": "RVS-Movie"}
RVS_HEADS = {"RVS-Ego": "ego", "RVS-Movie": "movie"}


class RvsVideo(RecordModel):
    video_path: Text
    conversations: list[Any]


class RvsQuestion(RecordModel):
    question: Text
    answer: Text
    end_time: Seconds


def read_rvs(data: Dataset) -> Iterator[SuiteQuestion]:
    for file in data.files(*(f"{folder}{name}" for name in RVS_FILES for folder in ("", "ego/", "movie/", "rvs/*/"))):
        folder, _, name = file.rpartition("/")
        make = partial(_rvs_video, data, file, RVS_FILES[name], f"{folder}/videos" if folder else "videos")
        yield from data.each(file, data.read(file), make)


def _rvs_video(data: Dataset, file: str, half: str, folder: str, value: Any, place: str) -> Iterator[SuiteQuestion]:
    record = RvsVideo.model_validate(value)
    video = data.video(record.video_path, folder)

    def make(each: Any, at: str) -> Iterator[SuiteQuestion]:
        asked = RvsQuestion.model_validate(each)
        yield SuiteQuestion(
            id=f"{file}:{at}", video=video, text=asked.question, prompt=asked.question, answer=asked.answer, scoring="judge",
            subtask=half, category=half, time_s=asked.end_time, tokens=256,
        )  # fmt: skip

    yield from data.each(file, record.conversations, make, f"{place}/")


def rvs_columns(scores: SuiteScores) -> Iterator[Column]:
    """Return for each half the fraction judged right, and the mean rating from 0 to 5."""
    for half, head in RVS_HEADS.items():
        if any(result.category == half for result in scores.results):
            yield scores.accuracy(f"{head} acc", f"{half}, accuracy", category=half)
            yield scores.rating(f"{head} 0-5", f"{half}, judge's rating", half)


# COIN (Tang et al., 2019), with the five tasks of VideoLLM-online (arXiv:2406.11816): steps of instructional videos
AHEAD = 5  # steps asked for at most
BRIEFLY = "Format your answer concisely. No extra text output."
NUMBERED = "Format your answer concisely, listing each action on a new line with a number prefix. No extra text output."
COIN_HEADS = {"step": "step", "next": "next", "task": "task", "procedure": "proc", "procedure+": "proc+"}


class CoinStep(RecordModel):
    segment: Clip
    label: Text


class CoinVideo(RecordModel):
    subset: Literal["testing", "training"]
    name: Text = Field(alias="class")
    annotation: list[CoinStep]
    recipe_type: Count | None = None
    start: Any = None
    end: Any = None

    @property
    def task(self) -> str:
        """``MakeCoffee`` is ``make coffee``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", self.name).lower()


def read_coin(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("COIN.json", "coin.json")[0]
    whole = data.read(file)
    if not isinstance(whole, dict) or not isinstance(whole.get("database"), dict):
        raise UserError(f"{data.root / file}: has no object 'database'; download it again")
    steps, tasks = set[str](), set[str]()  # of training too: the nearest label to an answer is taken of them
    for value in whole["database"].values():
        try:
            record = CoinVideo.model_validate(value)
        except ValueError:  # noted where its questions are made
            continue
        steps |= {step.label.lower() for step in record.annotation}
        tasks.add(record.task)
    make = partial(_coin_video, data, file, tuple(sorted(steps)), tuple(sorted(tasks)))
    yield from data.each(file, list(whole["database"].items()), make)


def _coin_video(
    data: Dataset, file: str, labels: tuple[str, ...], tasks: tuple[str, ...], named: tuple[str, Any], place: str
) -> Iterator[SuiteQuestion]:
    uid, record = named[0], CoinVideo.model_validate(named[1])
    if record.subset == "training":
        return
    steps, whole = [(step.segment, step.label.lower()) for step in record.annotation], clip_of((record.start, record.end))
    video = data.video(uid, "videos" if record.recipe_type is None else f"videos/{record.recipe_type}")

    def ask(kind: str, at: str, clip: tuple[float, float], text: str, answer: str, options: tuple[str, ...]) -> SuiteQuestion:
        many = "\n" in answer
        return SuiteQuestion(
            id=f"{file}:{place}:{uid}:{kind}{at}", video=video, text=text, prompt=text, answer=answer,
            scoring="steps" if many else "nearest", subtask=kind, options=options, clip=clip, tokens=128 if many else 32,
        )  # fmt: skip

    yield ask("task", "", whole, f"What is the overall activity in the video? {BRIEFLY}", record.task, tasks)
    for index, (clip, label) in enumerate(steps):
        yield ask("step", f"/{index}", clip, f"What is the action in the video? {BRIEFLY}", label, labels)
        if coming := [following for _, following in steps[index + 1 : index + 1 + AHEAD]]:
            yield ask("next", f"/{index}", clip, f"What is the next action for the video? {BRIEFLY}", coming[0], labels)
            count = f"next {len(coming)} actions" if len(coming) > 1 else "next action"
            for kind, before in (("procedure", "What"), ("procedure+", f"To {record.task}, what")):
                text = f"{before} is the {count} for the video? {NUMBERED if len(coming) > 1 else BRIEFLY}"
                yield ask(kind, f"/{index}", clip, text, "\n".join(coming), labels)


FORMATS = {
    "streamingbench": Suite(read_streamingbench, streaming_columns),
    "ovobench": Suite(read_ovobench, ovo_columns),
    "rvs": Suite(read_rvs, rvs_columns),
    "coin": Suite(read_coin, lambda scores: scores.accuracies(COIN_HEADS)),
}
