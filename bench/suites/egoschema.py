"""EgoSchema (Mangalam et al., 2023, arXiv:2308.09126): three minutes, one question, five options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from edgevlm.bench.suites.choices import letter_at, listed
from edgevlm.bench.suites.dataset import Dataset
from edgevlm.bench.suites.fields import Fields, Malformed
from edgevlm.bench.suites.schema import LETTERS, Suite, SuiteQuestion
from edgevlm.bench.suites.scoring import Record, chosen_letter
from edgevlm.bench.suites.tally import Column, Tally
from edgevlm.errors import UserError

PROMPT = """Select the best answer to the following multiple-choice question based on the video. Respond with only the letter \
(A, B, C, D, or E) of the correct option.
{question}
{options}
The best answer is:"""


def read(data: Dataset) -> Iterator[SuiteQuestion]:
    file = data.files("questions.json", "EgoSchema/questions.json")[0]
    answers = _answers(data)
    yield from data.each(file, data.read(file), partial(_record, data, file, answers))


def _answers(data: Dataset) -> Fields:
    """The 500 answers that are public; the others are known to the benchmark's server alone."""
    try:
        file = data.files("subset_answers.json", "EgoSchema/subset_answers.json")[0]
    except UserError:
        return Fields({})
    try:
        return Fields(data.read(file))
    except Malformed as error:
        raise UserError(f"{data.root / file}: {error}; download it again") from None


def _record(data: Dataset, file: str, answers: Fields, fields: Fields, place: str) -> Iterator[SuiteQuestion]:
    uid, text = fields.text("q_uid"), fields.text("question")
    options = tuple(fields.text(f"option {number}") for number in range(5))
    known = uid in answers
    yield SuiteQuestion(
        id=f"{file}:{place}:{uid}", video=data.video(uid), text=text,
        prompt=PROMPT.format(question=text, options=listed(options)),
        answer=letter_at(answers, uid, options) if known else "", scoring="choice", subtask="subset" if known else "held back",
        options=options,
    )  # fmt: skip


def columns(tally: Tally) -> Iterator[Column]:
    """The public subset; answers to the rest are for the benchmark's server."""
    yield tally.share("subset", "Public subset", subtask="subset")


def submission(records: Iterable[Record]) -> list[tuple[str, str]]:
    """``q_uid,answer``: the option's index from 0; 0 where the response chooses none."""
    rows = [("q_uid", "answer")]
    for record in records:
        letter = chosen_letter(record["response"], record["options"]) or LETTERS[0]
        rows.append((record["record"].rpartition(":")[2], str(LETTERS.index(letter))))
    return rows


SUITE = Suite("EgoSchema", read, columns, submission)
