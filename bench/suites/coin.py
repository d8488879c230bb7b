"""COIN (Tang et al., 2019), with the five tasks of VideoLLM-online (arXiv:2406.11816): steps of instructional videos."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgevlm.bench.suites.dataset import Dataset, SuiteQuestion
from edgevlm.bench.suites.fields import Fields, Malformed, clip_of, seconds_of
from edgevlm.bench.suites.scoring import Column, Suite, SuiteScores

AHEAD = 5  # steps asked for at most
BRIEFLY = "Format your answer concisely. No extra text output."
NUMBERED = "Format your answer concisely, listing each action on a new line with a number prefix. No extra text output."
HEADS = {"step": "step", "next": "next", "task": "task", "procedure": "proc", "procedure+": "proc+"}

Step = tuple[tuple[float, float], str]


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("COIN.json", "coin.json")[0]
    database = data.object(file, "database")
    steps, tasks = _labels(database)
    named = [{"uid": uid, "record": record} for uid, record in database.values.items()]

    def make(entry: Fields, place: str) -> Iterator[SuiteQuestion]:
        yield from _video(data, f"{file}:{place}", entry.text("uid"), Fields(entry.value("record")), steps, tasks)

    yield from data.each(file, named, make)


def _labels(database: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All labels of steps and of tasks, training's too: what an answer's nearest label is taken of."""
    steps, tasks = set(), set()
    for value in database.values.values():
        try:
            record = Fields(value)
            steps |= {label for _, label in _steps(record)}
            tasks.add(_task(record))
        except Malformed:  # noted where its questions are made
            continue
    return tuple(sorted(steps)), tuple(sorted(tasks))


def _task(record: Fields) -> str:
    """``MakeCoffee`` is ``make coffee``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", record.text("class")).lower()


def _steps(record: Fields) -> list[Step]:
    steps = []
    for value in record.list("annotation"):
        part = Fields(value)
        ends = part.list("segment", least=2)
        steps.append(
            (clip_of(seconds_of(ends[0], "segment[0]"), seconds_of(ends[1], "segment[1]")), part.text("label").lower())
        )
    return steps


def _video(
    data: Dataset, name: str, uid: str, record: Fields, labels: tuple[str, ...], tasks: tuple[str, ...]
) -> Iterator[SuiteQuestion]:
    if record.text("subset") not in ("testing", "training"):
        raise Malformed("subset is neither testing nor training")
    steps, task = _steps(record), _task(record)
    if record.text("subset") == "training":
        return
    folder = f"videos/{record.integer('recipe_type')}" if "recipe_type" in record else "videos"
    video = data.video(uid, folder)

    def ask(kind: str, at: str, clip: tuple[float, float], text: str, answer: str, options: tuple[str, ...]) -> SuiteQuestion:
        many = "\n" in answer
        return SuiteQuestion(
            id=f"{name}:{uid}:{kind}{at}", video=video, text=text, prompt=text, answer=answer,
            scoring="steps" if many else "nearest", subtask=kind, options=options, clip=clip, tokens=128 if many else 32,
        )  # fmt: skip

    overall = f"What is the overall activity in the video? {BRIEFLY}"
    yield ask("task", "", record.clip("start", "end"), overall, task, tasks)
    for index, (clip, label) in enumerate(steps):
        yield ask("step", f"/{index}", clip, f"What is the action in the video? {BRIEFLY}", label, labels)
        coming = [following for _, following in steps[index + 1 : index + 1 + AHEAD]]
        if not coming:
            continue
        yield ask("next", f"/{index}", clip, f"What is the next action for the video? {BRIEFLY}", coming[0], labels)
        for kind, before in (("procedure", "What"), ("procedure+", f"To {task}, what")):
            yield ask(kind, f"/{index}", clip, f"{before} is {_asked_for(len(coming))}", "\n".join(coming), labels)


def _asked_for(count: int) -> str:
    return f"the next action for the video? {BRIEFLY}" if count == 1 else f"the next {count} actions for the video? {NUMBERED}"


def columns(scores: SuiteScores) -> Iterator[Column]:
    """The five tasks, in VideoLLM-online's order."""
    yield from scores.accuracies(HEADS)


SUITE = Suite("COIN", read, columns)
