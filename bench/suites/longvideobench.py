"""LongVideoBench (Wu et al., 2024, arXiv:2407.15754), its validation half, without subtitles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from edgevlm.bench.suites.choices import letter_at, listed, options_of
from edgevlm.bench.suites.dataset import Dataset
from edgevlm.bench.suites.fields import Fields, Malformed
from edgevlm.bench.suites.schema import Suite, SuiteQuestion
from edgevlm.bench.suites.tally import Column, Tally

GROUPS = {15: "8-15 s", 60: "15-60 s", 600: "180-600 s", 3600: "900-3600 s"}
PROMPT = """{question}
{options}
Answer with the option's letter from the given choices directly."""


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("lvb_val.json", "lvb_val.jsonl", "LongVideoBench/lvb_val.json")[0]
    yield from data.each(file, data.read(file), partial(_record, data, file))


def _record(data: Dataset, file: str, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    text, options = fields.text("question"), options_of(fields, "candidates")
    yield SuiteQuestion(
        id=f"{file}:{place}", video=data.video(fields.text("video_path")), text=text,
        prompt=PROMPT.format(question=text, options=listed(options)), answer=letter_at(fields, "correct_choice", options),
        scoring="choice", subtask=GROUPS[_group(fields)], options=options,
    )  # fmt: skip


def _group(fields: Fields) -> int:
    """The group of durations, as the record says or as its duration does."""
    if "duration_group" not in fields:
        seconds = fields.seconds("duration")
        return next((group for group in GROUPS if seconds <= group), 3600)
    group = fields.whole("duration_group")
    if group not in GROUPS:
        raise Malformed(f"duration_group is {group}, not one of {', '.join(map(str, GROUPS))}")
    return group


def columns(tally: Tally) -> Iterator[Column]:
    """By group of durations, and all."""
    yield from tally.shares({name: name.removesuffix(" s") for name in GROUPS.values()})
    yield tally.share("all", "Overall")


SUITE = Suite("LongVideoBench", read, columns)
