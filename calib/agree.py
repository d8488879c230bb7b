"""Policies side by side on clips: who stays closest to full KV at the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgevlm.calib.choose import Contest, Measured, candidate, reason_of
from edgevlm.calib.fidelity import Fidelity
from edgevlm.calib.intervals import mean
from edgevlm.calib.journal import Journal, Record
from edgevlm.calib.observe import Clip
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.policies import create_policy

Cell = tuple[int, str, int]  # budget, policy, its |M|


def compare_by_agreement(
    fidelity: Fidelity,
    clips: Sequence[Clip],
    frames: int,
    policies: Sequence[str],
    budgets: Sequence[int],
    journal: Path,
    progress: Progress,
) -> dict[int, Contest]:
    """Stream the first ``frames`` of every clip under full KV, then under each policy at each budget of |M| tokens.

    What ``journal`` has already is not done again. Clusters are (clip, moment). Raises UserError.
    """
    contests: dict[int, Contest] = {}
    cells: list[Cell] = []
    for budget in budgets:
        contests[budget] = Contest()
        for policy in policies:
            progress(f"equal bytes: {policy} at {budget} tokens")
            try:
                cells.append((budget, policy, fidelity.fitted(policy, budget, frames)))
            except UserError as error:
                contests[budget].skipped.append((policy, reason_of(error)))
    with Journal(journal, {"journal": "edgevlm calibrate"}, resume=True) as kept:
        for number, clip in enumerate(clips):
            _watch(fidelity, clip, number, frames, cells, kept, progress)
        for budget, policy, _ in cells:
            records = [kept.records[policy, str(budget), number] for number in range(len(clips))]
            contests[budget].measured.append(_measured(policy, records))
    return contests


def _watch(
    fidelity: Fidelity, clip: Clip, number: int, frames: int, cells: Sequence[Cell], journal: Journal, progress: Progress
) -> None:
    todo = [cell for cell in cells if (cell[1], str(cell[0]), number) not in journal.records]
    if not todo:
        return
    progress(f"{clip.name}: full KV")
    reference = fidelity.reference(clip, frames, min(budget for budget, _, _ in todo))
    for done, (budget, policy, tokens) in enumerate(todo):
        progress(f"{clip.name}: {policy} at {budget} tokens ({done + 1} of {len(todo)})")
        record = fidelity.measure(reference, create_policy(policy), tokens, budget)
        journal.add({"policy": policy, "budget": str(budget), "stream": number, **record})


def _measured(policy: str, records: Sequence[Record]) -> Measured:
    nats = [moment for record in records for moment in record["kl"]]
    top1 = [same for record in records for moment in record["top1"] for same in moment]
    return Measured(
        candidate(policy, records, mean(nats), float(np.mean(top1))), [[-value for value in moment] for moment in nats]
    )
