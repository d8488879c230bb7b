"""When watches were open, and for how long, made of their events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgevlm.apps.run.events import wall_clock
from edgevlm.apps.watches.events import EventStore

MOST = 10_000  # events, or lines of a journal, that are looked at, the newest


@dataclass(frozen=True, slots=True)
class Opening:
    """From when to when a watch was open: seconds since 1970, closed None where it still was. probability: as it opened."""

    camera: str
    watch: str
    question: str
    opened: float
    closed: float | None
    probability: float
    evidence: Sequence[Mapping[str, Any]]

    def json(self) -> dict[str, Any]:
        """What ``GET /v1/digest`` and ``edgevlm digest --json`` tell of it."""
        return {
            "camera": self.camera, "watch": self.watch, "question": self.question, "opened": wall_clock(self.opened),
            "closed": None if self.closed is None else wall_clock(self.closed),
            "seconds": None if self.closed is None else round(self.closed - self.opened, 3),
            "probability": round(self.probability, 4), "evidence": list(self.evidence),
        }  # fmt: skip


def openings(
    store: EventStore, since: float, until: float, camera: str | None = None, search: str | None = None
) -> list[Opening]:
    """Watches that were open within a time, in the order in which they opened. search: words that all stand in its names."""
    found: dict[tuple[str, str, float], Opening] = {}
    within = store.query(since, until, camera, limit=MOST)[::-1]
    for event in [*store.open_at(since, camera), *within]:
        key = (event.camera, event.watch, event.opened)
        opening = Opening(
            event.camera, event.watch, event.question, event.opened, None, event.probability, event.evidence
        )  # fmt: skip
        if event.state == "close":
            opening = replace(found.get(key, opening), closed=event.time)
        found[key] = opening
    words = (search or "").lower().split()
    named = (
        each for each in found.values() if all(word in f"{each.camera} {each.watch} {each.question}".lower() for word in words)
    )
    return sorted(named, key=lambda each: each.opened)
