"""Video-MME (Fu et al., 2024, arXiv:2405.21075), without subtitles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from edgevlm.bench.suites.choices import letter_of, listed, options_of
from edgevlm.bench.suites.dataset import Dataset
from edgevlm.bench.suites.fields import Fields, Malformed, shown
from edgevlm.bench.suites.schema import Suite, SuiteQuestion
from edgevlm.bench.suites.tally import Column, Tally

DURATIONS = {"short": "short", "medium": "medium", "long": "long"}
PROMPT = """Select the best answer to the following multiple-choice question based on the video. Respond with only the letter \
(A, B, C, or D) of the correct option.
{question}
{options}
The best answer is:"""


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("videomme.jsonl", "videomme.json", "videomme/*.jsonl", "videomme/*.parquet", "*.parquet")[0]
    yield from data.each(file, data.read(file), partial(_record, data, file))


def _record(data: Dataset, file: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    duration = fields.text("duration")
    if duration not in DURATIONS:
        raise Malformed(f"duration is {shown(duration)}, not short, medium or long")
    options, text = options_of(fields, "options"), fields.text("question")
    yield SuiteQuestion(
        id=f"{file}:{place}", video=data.video(fields.text("videoID")), text=text,
        prompt=PROMPT.format(question=text, options=listed(options)), answer=letter_of(fields, "answer", options),
        scoring="choice", subtask=fields.text("task_type"), category=duration, options=options,
    )  # fmt: skip


def columns(tally: Tally) -> Iterator[Column]:
    """By the videos' duration, and all; then by task type."""
    yield from (tally.share(head, name, category=name) for name, head in DURATIONS.items())
    yield tally.share("all", "Overall")
    yield from tally.shares({})


SUITE = Suite("Video-MME", read, columns)
