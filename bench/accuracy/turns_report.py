"""What several questions to one memory came to: a row a turn, and how many answers the questions before them changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgevlm.bench.accuracy.report import ENTERS
from edgevlm.bench.accuracy.run import Outcome
from edgevlm.calib.intervals import Estimate, share

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnRow:
    """share: right; fresh: right when asked alone; changed: answers that differ in any token from those given alone."""

    policy: str
    budget: str
    turn: int
    share: Estimate
    fresh: Estimate
    changed: int

    def line(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "bench": "accuracy",
            "suite": outcome.settings.suite,
            "policy": self.policy,
            "budget": self.budget,
            "kind": f"turn{self.turn}",
            "streams": self.share.clusters,
            "accuracy": round(self.share.value, 4),
            "ci_low": round(self.share.low, 4),
            "ci_high": round(self.share.high, 4),
            "frames": outcome.settings.frames,
            "seed": outcome.settings.seed,
            "fresh": round(self.fresh.value, 4),
            "changed": self.changed,
        }


def turn_rows(outcome: Outcome) -> Iterator[TurnRow]:
    """Of the kinds that full KV answers often enough when they are asked alone."""
    full = [turn for record in outcome.records[outcome.cells[0]] for turn in record["turns"]]
    by_kind = {kind: share([[turn["fresh"]] for turn in full if turn["kind"] == kind]) for kind in {t["kind"] for t in full}}
    enters = {kind for kind, of in by_kind.items() if of.value >= ENTERS}
    for cell in outcome.cells:
        for number in range(outcome.settings.turns):
            picked = [record["turns"][number : number + 1] for record in outcome.records[cell]]
            turns = [turn for found in picked for turn in found if turn["kind"] in enters]
            if turns:
                right, fresh = (share([[turn[name]] for turn in turns]) for name in ("right", "fresh"))
                changed = sum(not turn["same"] for turn in turns)
                yield TurnRow(cell.label, cell.budget, number + 1, right, fresh, changed)


def describe_turns(outcome: Outcome, rows: list[TurnRow]) -> str:
    """A line a policy and budget: share right turn by turn, and the answers that earlier questions changed."""
    count = outcome.settings.turns
    width = max((len(row.policy) for row in rows), default=0) + 2
    heads = "".join(f"{f'turn {turn}':>8}" for turn in range(1, count + 1))
    lines = [f"{'policy':<{width}}{'budget':>8}{heads}{'asked alone':>13}{'changed':>9}"]
    for policy, budget in dict.fromkeys((row.policy, row.budget) for row in rows):
        of = {row.turn: row for row in rows if (row.policy, row.budget) == (policy, budget)}
        asked = sum(row.fresh.count for row in of.values())
        alone = sum(row.fresh.value * row.fresh.count for row in of.values()) / asked
        shares = "".join(f"{of[turn].share.value:>8.3f}" if turn in of else f"{'-':>8}" for turn in range(1, count + 1))
        lines.append(f"{policy:<{width}}{budget:>8}{shares}{alone:>13.3f}{sum(row.changed for row in of.values()):>9}")
    return "\n".join(lines + [f"skipped: {skip.label} at {skip.budget}: {skip.reason}" for skip in outcome.skipped])
