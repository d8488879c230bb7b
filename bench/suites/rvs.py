"""RVS-Ego and RVS-Movie (Flash-VStream, arXiv:2406.08085), in ReKV's files: open questions in the middle of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from edgevlm.bench.suites.dataset import Dataset, SuiteQuestion
from edgevlm.bench.suites.fields import Fields
from edgevlm.bench.suites.scoring import Column, Suite, SuiteScores

FILES = {"ego4d_oe.json": "RVS-Ego", "movienet_oe.json": "RVS-Movie"}
HEADS = {"RVS-Ego": "ego", "RVS-Movie": "movie"}


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    for file in data.files(*(f"{folder}{name}" for name in FILES for folder in ("", "ego/", "movie/", "rvs/*/"))):
        folder, _, name = file.rpartition("/")

        yield from data.each(file, data.read(file), partial(_video, data, file, FILES[name], folder))


def _video(data: Dataset, file: str, half: str, folder: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    video = data.video(fields.text("video_path"), f"{folder}/videos" if folder else "videos")

    def make(asked: Fields, at: str) -> Iterator[SuiteQuestion]:
        text = asked.text("question")
        yield SuiteQuestion(
            id=f"{file}:{at}", video=video, text=text, prompt=text, answer=asked.text("answer"), scoring="judge", subtask=half,
            category=half, time_s=asked.seconds("end_time"), tokens=256,
        )  # fmt: skip

    yield from data.each(file, fields.list("conversations"), make, f"{place}/")


def columns(scores: SuiteScores) -> Iterator[Column]:
    """Of each half the fraction that the judge calls right, and its mean rating from 0 to 5."""
    for half, head in HEADS.items():
        if any(result.category == half for result in scores.results):
            yield scores.accuracy(f"{head} acc", f"{half}, accuracy", category=half)
            yield scores.rating(f"{head} 0-5", f"{half}, judge's rating", half)


SUITE = Suite("RVS", read, columns)
