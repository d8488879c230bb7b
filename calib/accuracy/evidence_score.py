"""Evidence beside the demo world's truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import Case, CaseQuestion
from edgevlm.runtime.evidence import Evidence, Moment


@dataclass(frozen=True, slots=True)
class EvidenceScore:
    """How evidence compares with the truth. hit1, hit3: whether the first, or one of the first three, frames shows the answer.

    overlap: of the first one's box and the patches that show it, intersection over union. held: whether the memory has what
    shows it, a row of a true patch in any layer; said_held: what the rule said, None without one.
    """

    hit1: bool
    hit3: bool
    overlap: float
    held: bool
    said_held: bool | None


def score_evidence(
    found: Evidence, case: Case, question: CaseQuestion, held: NDArray[np.bool_], grid: tuple[int, int]
) -> EvidenceScore:
    """held: bool ``[layers, kv_heads, tokens of the stream]``; the newest frame is always seen."""
    tokens = case.owners.shape[1]
    there = question.is_about_now or bool(held[:, :, question.evidence].any())
    frames = question.evidence // tokens

    def shows(moment: Moment) -> bool:
        return bool(((moment.frame <= frames) & (frames <= moment.last_frame)).any())

    shown = [shows(moment) for moment in found.moments]
    overlap = _overlap(found.moments[0], question.evidence, tokens, grid) if found.moments else 0.0
    return EvidenceScore(shown[:1] == [True], any(shown), overlap, there, found.held)


def _overlap(moment: Moment, evidence: NDArray[np.int64], tokens: int, grid: tuple[int, int]) -> float:
    frames = evidence // tokens
    true = np.zeros(tokens, bool)
    true[evidence[(moment.frame <= frames) & (frames <= moment.last_frame)] % tokens] = True
    left, top, right, bottom = np.array(moment.box) * [grid[1], grid[0], grid[1], grid[0]]
    rows, columns = np.divmod(np.arange(tokens), grid[1])
    boxed = (left - 0.5 < columns) & (columns < right - 0.5) & (top - 0.5 < rows) & (rows < bottom - 0.5)
    return float((boxed & true).sum() / max(1, (boxed | true).sum()))
