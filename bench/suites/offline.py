"""Multiple choice about whole videos: Video-MME, MLVU, EgoSchema, MVBench and LongVideoBench, all without subtitles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from edgevlm.bench.suites.dataset import Dataset, SuiteQuestion
from edgevlm.bench.suites.fields import LETTERS, Fields, Malformed, listed, shown
from edgevlm.bench.suites.scoring import Column, Record, Suite, SuiteScores, chosen_letter, mean
from edgevlm.errors import UserError

LETTER_ONLY = """Select the best answer to the following multiple-choice question based on the video. Respond with only the \
letter ({letters}) of the correct option.
{question}
{options}
The best answer is:"""


def _choice(name: str, video: str, text: str, options: tuple[str, ...], answer: str, prompt: str, **more: Any) -> SuiteQuestion:
    """A multiple choice. prompt: with ``{question}`` and ``{options}``; options in parentheses where it ends with one."""
    form = "({letter}) {text}" if prompt.endswith("(") else "{letter}. {text}"
    asked = prompt.format(question=text, options=listed(options, form), letters="A, B, C, or D")
    return SuiteQuestion(
        id=name, video=video, text=text, prompt=asked, answer=answer, scoring="choice", options=options, **more
    )  # fmt: skip


# Video-MME (Fu et al., 2024, arXiv:2405.21075)

DURATIONS = ("short", "medium", "long")


def _read_videomme(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("videomme.jsonl", "videomme.json", "videomme/*.jsonl", "videomme/*.parquet", "*.parquet")[0]
    yield from data.each(file, data.read(file), partial(videomme_record, data, file))


def videomme_record(data: Dataset, file: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    duration = fields.text("duration")
    if duration not in DURATIONS:
        raise Malformed(f"duration is {shown(duration)}, not short, medium or long")
    options, text = fields.options("options"), fields.text("question")
    yield _choice(
        f"{file}:{place}", data.video(fields.text("videoID")), text, options, fields.letter("answer", options), LETTER_ONLY,
        subtask=fields.text("task_type"), category=duration,
    )  # fmt: skip


def _videomme_columns(scores: SuiteScores) -> Iterator[Column]:
    """By the videos' duration, and all; then by task type."""
    yield from (scores.accuracy(name, name, category=name) for name in DURATIONS)
    yield scores.accuracy("all", "Overall")
    yield from scores.accuracies({})


VIDEOMME = Suite("Video-MME", _read_videomme, _videomme_columns)

# MLVU (Zhou et al., 2024, arXiv:2406.04264): seven multiple-choice tasks, and two that are answered in sentences

MLVU_CHOSEN = {
    "topic_reasoning": "TR", "anomaly_reco": "AR", "findNeedle": "NQA", "ego": "ER", "plotQA": "PQA", "order": "AO",
    "count": "AC",
}  # fmt: skip
MLVU_OPEN = {"subPlot": "SSC", "summary": "VS"}
CHOICE_TASKS, OPEN_TASKS = "Multiple choice", "Generation"
MLVU_PROMPT = """Watch the video closely: what happens and in which order, objects and how they move, people and what they do. \
Then select the best option for the question.
Question: {question}
Options:
{options}
Only give the best option.
Best option: ("""


def _read_mlvu(data: Dataset) -> Iterator[SuiteQuestion]:
    for file in data.files("json/[1-9]_*.json", "[1-9]_*.json", "MLVU/json/[1-9]_*.json"):
        folder = file.rpartition("/")[2].removesuffix(".json")
        yield from data.each(file, data.read(file), partial(mlvu_record, data, file, folder))


def mlvu_record(data: Dataset, file: str, folder: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    name, text, task = f"{file}:{place}", fields.text("question"), fields.text("question_type")
    video = data.video(fields.text("video"), f"video/{folder}", f"MLVU/video/{folder}")
    if "candidates" in fields:
        options = fields.options("candidates")
        answer = fields.letter_for("answer", options)
        yield _choice(name, video, text, options, answer, MLVU_PROMPT, subtask=task, category=CHOICE_TASKS)
    else:
        yield SuiteQuestion(
            id=name, video=video, text=text, prompt=text, answer=fields.text("answer"), scoring="judge", subtask=task,
            category=OPEN_TASKS, tokens=256,
        )  # fmt: skip


def _mlvu_columns(scores: SuiteScores) -> Iterator[Column]:
    """Tasks and their mean, M-Avg; then what a judge says of the tasks of generation."""
    tasks = list(scores.accuracies(MLVU_CHOSEN, CHOICE_TASKS))
    yield from (*tasks, mean("M-Avg", "M-Avg, mean of tasks", tasks))
    if written := list(scores.accuracies(MLVU_OPEN, OPEN_TASKS)):
        yield from (*written, scores.rating("rating", "Generation, judge's rating", OPEN_TASKS))


MLVU = Suite("MLVU", _read_mlvu, _mlvu_columns)

# EgoSchema (Mangalam et al., 2023, arXiv:2308.09126): three minutes, one question, five options


def _read_egoschema(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("questions.json", "EgoSchema/questions.json")[0]
    yield from data.each(file, data.read(file), partial(_egoschema_record, data, file, _egoschema_answers(data)))


def _egoschema_answers(data: Dataset) -> Fields:
    """The 500 answers that are public; the others are known to the benchmark's server alone."""
    try:
        file = data.files("subset_answers.json", "EgoSchema/subset_answers.json")[0]
    except UserError:
        return Fields({})
    return data.object(file)


def _egoschema_record(data: Dataset, file: str, answers: Fields, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    uid, text = fields.text("q_uid"), fields.text("question")
    options = tuple(fields.text(f"option {number}") for number in range(5))
    answer, subtask = (answers.letter_at(uid, options), "subset") if uid in answers else ("", "held back")
    prompt = LETTER_ONLY.replace("{letters}", "A, B, C, D, or E")
    yield _choice(f"{file}:{place}:{uid}", data.video(uid), text, options, answer, prompt, subtask=subtask)


def _egoschema_columns(scores: SuiteScores) -> Iterator[Column]:
    """The public subset; answers to the rest are for the benchmark's server."""
    yield scores.accuracy("subset", "Public subset", subtask="subset")


def egoschema_submission(records: Iterable[Record]) -> list[tuple[str, str]]:
    """``q_uid,answer``: the option's index from 0; 0 where the response chooses none."""
    rows = [("q_uid", "answer")]
    for record in records:
        letter = chosen_letter(record["response"], record["options"]) or LETTERS[0]
        rows.append((record["record"].rpartition(":")[2], str(LETTERS.index(letter))))
    return rows


EGOSCHEMA = Suite("EgoSchema", _read_egoschema, _egoschema_columns, egoschema_submission)

# MVBench (Li et al., 2023, arXiv:2311.17005): twenty tasks on short clips

MVBENCH_TASKS = {  # by file: name, head, folder of videos
    "action_sequence": ("Action Sequence", "AS", "star/Charades_v1_480"),
    "action_prediction": ("Action Prediction", "AP", "star/Charades_v1_480"),
    "action_antonym": ("Action Antonym", "AA", "ssv2_video"),
    "fine_grained_action": ("Fine-grained Action", "FA", "Moments_in_Time_Raw/videos"),
    "unexpected_action": ("Unexpected Action", "UA", "FunQA_test/test"),
    "object_existence": ("Object Existence", "OE", "clevrer/video_validation"),
    "object_interaction": ("Object Interaction", "OI", "star/Charades_v1_480"),
    "object_shuffle": ("Object Shuffle", "OS", "perception/videos"),
    "moving_direction": ("Moving Direction", "MD", "clevrer/video_validation"),
    "action_localization": ("Action Localization", "AL", "sta/sta_video"),
    "scene_transition": ("Scene Transition", "ST", "scene_qa/video"),
    "action_count": ("Action Count", "AC", "perception/videos"),
    "moving_count": ("Moving Count", "MC", "clevrer/video_validation"),
    "moving_attribute": ("Moving Attribute", "MA", "clevrer/video_validation"),
    "state_change": ("State Change", "SC", "perception/videos"),
    "fine_grained_pose": ("Fine-grained Pose", "FP", "nturgbd"),
    "character_order": ("Character Order", "CO", "perception/videos"),
    "egocentric_navigation": ("Egocentric Navigation", "EN", "vlnqa"),
    "episodic_reasoning": ("Episodic Reasoning", "ER", "tvqa/frames_fps3_hq"),
    "counterfactual_inference": ("Counterfactual Inference", "CI", "clevrer/video_validation"),
}
MVBENCH_CLIPPED = ("AS", "AP", "OI", "AL", "ER")  # whose records have a start and an end
MVBENCH_PICTURES = {"ER": 3.0}  # whose videos are folders of frames, at so many a second
MVBENCH_PROMPT = """Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement \
of objects, and the action and pose of persons. Based on your observations, select the best option that accurately addresses \
the question.
Question: {question}
Options:
{options}
Only give the best option.
Best option: ("""


def _read_mvbench(data: Dataset) -> Iterator[SuiteQuestion]:
    for file in data.files(*(f"{folder}{task}.json" for task in MVBENCH_TASKS for folder in ("json/", ""))):
        task = file.rpartition("/")[2].removesuffix(".json")
        yield from data.each(file, data.read(file), partial(_mvbench_record, data, file, task))


def _mvbench_record(data: Dataset, file: str, task: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    name, head, folder = MVBENCH_TASKS[task]
    text, options, rate = fields.text("question"), fields.options("candidates"), MVBENCH_PICTURES.get(head)
    video = data.video(fields.text("video"), f"video/{folder}", folder, pictures=rate is not None)
    yield _choice(
        f"{file}:{place}", video, text, options, fields.letter_for("answer", options), MVBENCH_PROMPT, subtask=name,
        clip=fields.clip("start", "end") if head in MVBENCH_CLIPPED else None, rate=rate,
    )  # fmt: skip


def _mvbench_columns(scores: SuiteScores) -> Iterator[Column]:
    """The twenty tasks and their mean."""
    tasks = list(scores.accuracies({name: head for name, head, _ in MVBENCH_TASKS.values()}))
    yield from (*tasks, mean("Avg", "Mean of tasks", tasks))


MVBENCH = Suite("MVBench", _read_mvbench, _mvbench_columns)

# LongVideoBench (Wu et al., 2024, arXiv:2407.15754), its validation half

GROUPS = {15: "8-15 s", 60: "15-60 s", 600: "180-600 s", 3600: "900-3600 s"}
LONGVIDEOBENCH_PROMPT = """{question}
{options}
Answer with the option's letter from the given choices directly."""


def _read_longvideobench(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("lvb_val.json", "lvb_val.jsonl", "LongVideoBench/lvb_val.json")[0]
    yield from data.each(file, data.read(file), partial(longvideobench_record, data, file))


def longvideobench_record(data: Dataset, file: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    text, options = fields.text("question"), fields.options("candidates")
    yield _choice(
        f"{file}:{place}", data.video(fields.text("video_path")), text, options, fields.letter_at("correct_choice", options),
        LONGVIDEOBENCH_PROMPT, subtask=GROUPS[_duration_group(fields)],
    )  # fmt: skip


def _duration_group(fields: Fields) -> int:
    """The group of durations, as the record says or as its duration does."""
    if "duration_group" not in fields:
        seconds = fields.seconds("duration")
        return next((group for group in GROUPS if seconds <= group), 3600)
    group = fields.integer("duration_group")
    if group not in GROUPS:
        raise Malformed(f"duration_group is {group}, not one of {', '.join(map(str, GROUPS))}")
    return group


def _longvideobench_columns(scores: SuiteScores) -> Iterator[Column]:
    """By group of durations, and all."""
    yield from scores.accuracies({name: name.removesuffix(" s") for name in GROUPS.values()})
    yield scores.accuracy("all", "Overall")


LONGVIDEOBENCH = Suite("LongVideoBench", _read_longvideobench, _longvideobench_columns)
