"""Convert published benchmarks' files to questions, and compute the columns of their result tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

from edgevlm.bench.suites.records import LETTERS, Count, Dataset, Options, Poll, Seconds, SuiteQuestion, Text, reader
from edgevlm.bench.suites.scoring import Line, Scores, mean

# the fields that each reader takes from a record: name -> type
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


def listed(options: tuple[str, ...]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))


# StreamingBench (Lin et al., 2024, arXiv:2411.03628): questions during a stream, sequential questions and proactive ones
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
POLLED_ON_S = 4.0  # polling continues for this many seconds after a proactive question's right moment


def read_streamingbench(data: Dataset) -> Iterator[SuiteQuestion]:
    """Yield StreamingBench's questions. If two files hold the same part, only the one without ``_stream`` is read."""
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
    """Yield a record's question. ``told``: each video's earlier questions and answers, for questions that build on them."""
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
    """Yield a column for each task, for each category and for all questions, as in StreamingBench's Table 2."""
    for category, names in STREAMING.items():
        if tasks := list(scores.subtasks(names, category)):
            yield from (*tasks, scores.accuracy(category, category))
    yield scores.accuracy("Overall")


# OVO-Bench (Li et al., 2025, arXiv:2501.05510): questions about the past, about now, and about the near future
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
FORWARD = {  # task -> the prompt for its questions
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
    """Yield a column for each task, for the mean of each category's tasks, and for the mean of the three categories."""
    categories = []
    for category, names in TASKS.items():
        if tasks := list(scores.subtasks(names, category)):
            categories.append(mean(f"{category}, mean of tasks", tasks))
            yield from (*tasks, categories[-1])
    yield mean("Overall, mean of categories", categories)


class Suite(NamedTuple):
    """A published benchmark. ``read`` yields a data folder's questions. ``columns`` computes columns from saved answers."""

    read: Callable[[Dataset], Iterable[SuiteQuestion]]
    columns: Callable[[Scores], Iterator[Line]]


FORMATS = {
    "streamingbench": Suite(read_streamingbench, streaming_columns),
    "ovobench": Suite(read_ovobench, ovo_columns),
}
