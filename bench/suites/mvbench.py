"""MVBench (Li et al., 2023, arXiv:2311.17005): twenty tasks on short clips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from edgevlm.bench.suites.choices import letter_for, listed, options_of
from edgevlm.bench.suites.dataset import Dataset
from edgevlm.bench.suites.fields import Fields
from edgevlm.bench.suites.schema import Suite, SuiteQuestion
from edgevlm.bench.suites.tally import Column, Tally, mean


@dataclass(frozen=True, slots=True)
class MVBenchTask:
    """folder: of its videos; clipped: its records have a start and an end; rate: pictures a second of a folder of frames."""

    name: str
    head: str
    folder: str
    clipped: bool = False
    rate: float | None = None


TASKS = {
    "action_sequence": MVBenchTask("Action Sequence", "AS", "star/Charades_v1_480", clipped=True),
    "action_prediction": MVBenchTask("Action Prediction", "AP", "star/Charades_v1_480", clipped=True),
    "action_antonym": MVBenchTask("Action Antonym", "AA", "ssv2_video"),
    "fine_grained_action": MVBenchTask("Fine-grained Action", "FA", "Moments_in_Time_Raw/videos"),
    "unexpected_action": MVBenchTask("Unexpected Action", "UA", "FunQA_test/test"),
    "object_existence": MVBenchTask("Object Existence", "OE", "clevrer/video_validation"),
    "object_interaction": MVBenchTask("Object Interaction", "OI", "star/Charades_v1_480", clipped=True),
    "object_shuffle": MVBenchTask("Object Shuffle", "OS", "perception/videos"),
    "moving_direction": MVBenchTask("Moving Direction", "MD", "clevrer/video_validation"),
    "action_localization": MVBenchTask("Action Localization", "AL", "sta/sta_video", clipped=True),
    "scene_transition": MVBenchTask("Scene Transition", "ST", "scene_qa/video"),
    "action_count": MVBenchTask("Action Count", "AC", "perception/videos"),
    "moving_count": MVBenchTask("Moving Count", "MC", "clevrer/video_validation"),
    "moving_attribute": MVBenchTask("Moving Attribute", "MA", "clevrer/video_validation"),
    "state_change": MVBenchTask("State Change", "SC", "perception/videos"),
    "fine_grained_pose": MVBenchTask("Fine-grained Pose", "FP", "nturgbd"),
    "character_order": MVBenchTask("Character Order", "CO", "perception/videos"),
    "egocentric_navigation": MVBenchTask("Egocentric Navigation", "EN", "vlnqa"),
    "episodic_reasoning": MVBenchTask("Episodic Reasoning", "ER", "tvqa/frames_fps3_hq", clipped=True, rate=3.0),
    "counterfactual_inference": MVBenchTask("Counterfactual Inference", "CI", "clevrer/video_validation"),
}
PROMPT = """Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement of \
objects, and the action and pose of persons. Based on your observations, select the best option that accurately addresses \
the question.
Question: {question}
Options:
{options}
Only give the best option.
Best option: ("""


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    names = [f"{folder}{task}.json" for task in TASKS for folder in ("json/", "")]
    for file in data.files(*names):
        task = TASKS[file.rpartition("/")[2].removesuffix(".json")]
        yield from data.each(file, data.read(file), partial(_record, data, file, task))


def _record(data: Dataset, file: str, task: MVBenchTask, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    text, options = fields.text("question"), options_of(fields, "candidates")
    video = data.video(fields.text("video"), f"video/{task.folder}", task.folder, pictures=task.rate is not None)
    yield SuiteQuestion(
        id=f"{file}:{place}", video=video, text=text,
        prompt=PROMPT.format(question=text, options=listed(options, "({letter}) {text}")),
        answer=letter_for(fields, "answer", options), scoring="choice", subtask=task.name, options=options,
        clip=fields.clip("start", "end") if task.clipped else None, rate=task.rate,
    )  # fmt: skip


def columns(tally: Tally) -> Iterator[Column]:
    """The twenty tasks and their mean."""
    tasks = list(tally.shares({task.name: task.head for task in TASKS.values()}))
    yield from (*tasks, mean("Avg", "Mean of tasks", tasks))


SUITE = Suite("MVBench", read, columns)
