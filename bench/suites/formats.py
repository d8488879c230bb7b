"""The published benchmarks' files: how each becomes questions, and the columns of its table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

from edgevlm.bench.suites.records import LETTERS, Clip, Count, Dataset, Options, Poll, Seconds, SuiteQuestion, Text, reader
from edgevlm.bench.suites.scoring import Line, Scores, mean
from edgevlm.errors import UserError

# fields that are read of a record, name to type
streaming_choice = reader(video_path=Text, question=Text, options=Options, answer=Text, task_type=Text, time_stamp=Seconds)
streaming_proactive = reader(
    video_path=Text, question=Text, ground_truth_output=Text, time_stamp=Seconds, ground_truth_time_stamp=Seconds
)
ovo_head = reader(task=Text, video=Text, realtime=Seconds)
ovo_choice = reader(question=Text, options=Options, gt=Count)
ovo_forward = {
    "REC": reader(activity=Text, count=Count),
    "SSR": reader(step=Text, type=Literal[0, 1]),
    "CRR": reader(question=Text, type=Literal[0, 1]),
}
rvs_question = reader(video_path=Text, question=Text, answer=Text, end_time=Seconds)
coin_video = reader(
    subset=Literal["testing", "training"], annotation=list[Any], start=Seconds, end=Seconds, recipe_type=(Count | None, None),
    **{"class": Text},
)  # fmt: skip
coin_step = reader(segment=Clip, label=Text)


def listed(options: tuple[str, ...]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))


# StreamingBench (Lin et al., 2024, arXiv:2411.03628): questions in the middle of a stream, in sequence, and proactive ones
REAL, OMNI, CONTEXTUAL = "Real-time visual", "Omni-source", "Contextual"
STREAMING = {
    REAL: (
        "Object Perception", "Causal Reasoning", "Clips Summarize", "Attribute Perception", "Event Understanding",
        "Text-Rich Understanding", "Prospective Reasoning", "Spatial Understanding", "Action Perception", "Counting",
    ),
    OMNI: ("Emotion Recognition", "Scene Understanding", "Source Discrimination", "Multimodal Alignment"),
    CONTEXTUAL: (
        "Anomaly Context Understanding", "Misleading Context Understanding", "Sequential Question Answering",
        "Proactive Output",
    ),
}  # fmt: skip
CATEGORIES = {task: category for category, tasks in STREAMING.items() for task in tasks}
PARTS = {"real": REAL, "omni": OMNI, "sqa": CONTEXTUAL, "proactive": CONTEXTUAL}
CHOICE = """{before}Answer this multiple-choice question about the video. Respond with only the letter (A, B, C, or D) of the \
correct option.

Question: {question}

Options:
{options}

The best option is:"""
POLLED = '{question} Is it the right time to output "{output}"? You can only answer yes or no.'
POLLED_ON_S = 4.0  # after the moment itself


def read_streamingbench(data: Dataset) -> Iterator[SuiteQuestion]:
    """A part may be there twice, record by record and as ``_stream``, grouped by video: the same questions."""
    patterns = [f"{folder}questions_{part}*.json" for folder in ("", "src/data/", "data/") for part in PARTS]
    chosen: dict[str, str] = {}
    for file in sorted(data.files(*patterns), key=lambda file: ("_stream" in file, file)):
        name = file.rpartition("/")[2]
        chosen.setdefault(next(part for part in PARTS if name.startswith(f"questions_{part}")), file)
    for part, file in chosen.items():
        make = partial(streaming_question, data, part, defaultdict(list))
        yield from data.questions(file, data.read(file), make, "questions")


def streaming_question(
    data: Dataset, part: str, told: defaultdict[str, list[str]], value: Any, name: str
) -> Iterator[SuiteQuestion]:
    """told: earlier questions of each video with their answers, which a question in sequence repeats."""
    asked = streaming_proactive(value) if part == "proactive" else streaming_choice(value)
    video, text = data.video(asked["video_path"]), asked["question"]
    if part == "proactive":
        due, output = asked["ground_truth_time_stamp"], asked["ground_truth_output"]
        poll = Poll(POLLED.format(question=text, output=output), due + POLLED_ON_S, due)
        yield SuiteQuestion(
            id=name, video=video, text=text, prompt=text, answer=output, scoring="proactive", subtask="Proactive Output",
            category=CONTEXTUAL, time_s=asked["time_stamp"] + 1, poll=poll, tokens=64,
        )  # fmt: skip
        return
    options, before, answer = asked["options"], "", asked["answer"].strip("().: ").upper()
    if len(answer) != 1 or answer not in LETTERS[: len(options)]:
        raise ValueError(f"answer is not a letter of its {len(options)} options")
    if part == "sqa":
        before = "Questions so far, with their answers:\n" + "\n".join(told[video]) + "\n\n" if told[video] else ""
        told[video].append(f"At {value['time_stamp']}: {text} {options[LETTERS.index(answer)]}")
    yield SuiteQuestion(
        id=name, video=video, text=text, answer=answer, scoring="first-letter", subtask=asked["task_type"],
        prompt=CHOICE.format(before=before, question=text, options=listed(options)),
        category=CATEGORIES.get(asked["task_type"], PARTS[part]), options=options, time_s=asked["time_stamp"],
    )  # fmt: skip


def streaming_columns(scores: Scores) -> Iterator[Line]:
    """Tasks, then their category's fraction of all its questions; all questions last, as Table 2 has them."""
    for category, names in STREAMING.items():
        if tasks := list(scores.subtasks(names, category)):
            yield from (*tasks, scores.accuracy(category, category))
    yield scores.accuracy("Overall")


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
FORWARD = {  # task -> the prompt for its text
    "REC": """People in this video may do the following again and again: {}. Count how many times it \
has been done so far, by whomever; a complete motion counts as one.
Respond only with a single number.""",
    "SSR": """The video is a tutorial. One of its steps is: {}
Is this step being performed right now?
Answer only with "Yes" or "No".""",
    "CRR": """{}
Does what has been seen so far, its newest frames above all, give enough information to answer this question?
Answer only with "Yes" or "No".""",
}


def read_ovobench(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("ovo_bench_new.json", "data/ovo_bench_new.json", "ovo_bench*.json")[0]
    yield from data.questions(file, data.read(file), partial(ovo_question, data), "test_info")


def ovo_question(data: Dataset, value: Any, name: str) -> Iterator[SuiteQuestion]:
    head, options = ovo_head(value), tuple[str, ...]()
    if (task := head["task"]) not in OVO_CATEGORIES:
        raise ValueError(f"task is {task}, not one of {', '.join(OVO_CATEGORIES)}")
    if task in FORWARD:
        text, truth = ovo_forward[task](value).values()
        prompt, scoring = FORWARD[task].format(text), "digits" if task == "REC" else "yes-no"
        answer = str(truth) if task == "REC" else ("No", "Yes")[truth]
    else:
        asked = ovo_choice(value)
        text, options, scoring = asked["question"], asked["options"], "letter-within"
        if asked["gt"] >= len(options):
            raise ValueError(f"gt is {asked['gt']}, not an index of its {len(options)} options")
        prompt, answer = OVO_CHOICE.format(question=text, options=listed(options)), LETTERS[asked["gt"]]
    yield SuiteQuestion(
        id=name, video=data.video(head["video"], "src_videos", "data/src_videos"), text=text, prompt=prompt, answer=answer,
        scoring=scoring, subtask=task, category=OVO_CATEGORIES[task], options=options, time_s=head["realtime"],
    )  # fmt: skip


def ovo_columns(scores: Scores) -> Iterator[Line]:
    """Tasks, the mean of each category's tasks, and the mean of the three."""
    categories = []
    for category, names in TASKS.items():
        if tasks := list(scores.subtasks(names, category)):
            categories.append(mean(f"{category}, mean of tasks", tasks))
            yield from (*tasks, categories[-1])
    yield mean("Overall, mean of categories", categories)


# RVS-Ego and RVS-Movie (Flash-VStream, arXiv:2406.08085), in ReKV's files: open questions in the middle of a stream
RVS_FILES = {"ego4d_oe.json": "RVS-Ego", "movienet_oe.json": "RVS-Movie"}


def read_rvs(data: Dataset) -> Iterator[SuiteQuestion]:
    for file in data.files(*(f"{folder}{name}" for name in RVS_FILES for folder in ("", "ego/", "movie/", "rvs/*/"))):
        folder, _, name = file.rpartition("/")
        make = partial(_rvs_question, data, RVS_FILES[name], f"{folder}/videos" if folder else "videos")
        yield from data.questions(file, data.read(file), make, "conversations")


def _rvs_question(data: Dataset, half: str, folder: str, value: Any, name: str) -> Iterator[SuiteQuestion]:
    asked = rvs_question(value)
    yield SuiteQuestion(
        id=name, video=data.video(asked["video_path"], folder), text=asked["question"], prompt=asked["question"],
        answer=asked["answer"], scoring="judge", subtask=half, category=half, time_s=asked["end_time"], tokens=256,
    )  # fmt: skip


def rvs_columns(scores: Scores) -> Iterator[Line]:
    """Return for each half the fraction judged right, and the mean rating from 0 to 5."""
    for half in RVS_FILES.values():
        if scores.among(half):
            yield scores.accuracy(f"{half}, accuracy", half)
            yield scores.rating(f"{half}, judge's rating", half)


# COIN (Tang et al., 2019), with the five tasks of VideoLLM-online (arXiv:2406.11816): steps of instructional videos
AHEAD = 5  # steps asked for at most
BRIEFLY = "Format your answer concisely. No extra text output."
NUMBERED = "Format your answer concisely, listing each action on a new line with a number prefix. No extra text output."
COIN_TASKS = ("step", "next", "task", "procedure", "procedure+")


def read_coin(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("COIN.json", "coin.json")[0]
    whole = data.read(file)
    if not isinstance(whole, dict) or not isinstance(whole.get("database"), dict):
        raise UserError(f"{data.root / file}: has no object 'database'; download it again")
    labels, tasks = set[str](), set[str]()  # of training too: the nearest label to an answer is taken of them
    for value in whole["database"].values():
        try:
            _, task, steps = _coin_record(value)
        except ValueError:  # noted where its questions are made
            continue
        labels |= {label for _, label in steps}
        tasks.add(task)
    make = partial(_coin_questions, data, tuple(sorted(labels)), tuple(sorted(tasks)))
    yield from data.questions(file, list(whole["database"].items()), make)


def _coin_record(value: Any) -> tuple[dict[str, Any], str, list[tuple[tuple[float, float], str]]]:
    """A video's fields, its task (``MakeCoffee`` is ``make coffee``), and its steps, a clip and a label each."""
    record = coin_video(value)
    task = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", record["class"]).lower()
    steps = [coin_step(step) for step in record["annotation"]]
    return record, task, [(step["segment"], step["label"].lower()) for step in steps]


def _coin_questions(
    data: Dataset, labels: tuple[str, ...], tasks: tuple[str, ...], named: tuple[str, Any], name: str
) -> Iterator[SuiteQuestion]:
    uid, (record, task, steps) = named[0], _coin_record(named[1])
    if record["subset"] == "training":
        return
    whole = coin_step({"segment": (record["start"], record["end"]), "label": task})["segment"]
    recipe = record["recipe_type"]
    video = data.video(uid, "videos" if recipe is None else f"videos/{recipe}")

    def ask(kind: str, at: str, clip: tuple[float, float], text: str, answer: str, options: tuple[str, ...]) -> SuiteQuestion:
        many = "\n" in answer
        return SuiteQuestion(
            id=f"{name}:{uid}:{kind}{at}", video=video, text=text, prompt=text, answer=answer,
            scoring="steps" if many else "nearest", subtask=kind, options=options, clip=clip, tokens=128 if many else 32,
        )  # fmt: skip

    yield ask("task", "", whole, f"What is the overall activity in the video? {BRIEFLY}", task, tasks)
    for index, (clip, label) in enumerate(steps):
        yield ask("step", f"/{index}", clip, f"What is the action in the video? {BRIEFLY}", label, labels)
        if coming := [following for _, following in steps[index + 1 : index + 1 + AHEAD]]:
            yield ask("next", f"/{index}", clip, f"What is the next action for the video? {BRIEFLY}", coming[0], labels)
            count = f"next {len(coming)} actions" if len(coming) > 1 else "next action"
            for kind, before in (("procedure", "What"), ("procedure+", f"To {task}, what")):
                text = f"{before} is the {count} for the video? {NUMBERED if len(coming) > 1 else BRIEFLY}"
                yield ask(kind, f"/{index}", clip, text, "\n".join(coming), labels)


class Suite(NamedTuple):
    """A published benchmark. read: the questions of a data folder; columns: the lines of its table, from what was answered."""

    read: Callable[[Dataset], Iterable[SuiteQuestion]]
    columns: Callable[[Scores], Iterator[Line]]


FORMATS = {
    "streamingbench": Suite(read_streamingbench, streaming_columns),
    "ovobench": Suite(read_ovobench, ovo_columns),
    "rvs": Suite(read_rvs, rvs_columns),
    "coin": Suite(read_coin, lambda scores: scores.subtasks(COIN_TASKS)),
}
