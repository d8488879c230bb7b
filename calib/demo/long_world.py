"""A demo camera for long streams: a few objects visit once, all others come and go as in :class:`World`.

A visitor's shape is its own, so that a question about it has one answer however long ago it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgevlm.calib.demo.world import COLORS, MAX_PRESENT, SHAPES, Thing, World

GAPS = (30, 100, 300, 1_000, 3_000, 10_000, 30_000)
"""Approximate frames between a visitor's last one and the end of the stream."""

STAYS = (8, 24)  # fewest and most frames that a visitor stays
AT_MOST = 5  # visitors: leaves three shapes to all others


@dataclass(slots=True)
class Visit:
    """An object that is shown only in frames ``[enters, leaves)``."""

    enters: int
    leaves: int
    color: int
    shape: int
    thing: Thing | None = field(default=None, compare=False)  # once it has come


class LongWorld(World):
    """An endless stream with ``visits``, in order and one at a time."""

    def __init__(self, seed: int | list[int], visits: Sequence[Visit]) -> None:
        super().__init__(seed)
        self.visits = list(visits)
        self._kept = {visit.shape for visit in visits}

    def _happen(self) -> None:
        now = self.history.now
        for visit in self.visits:
            if visit.enters == now:
                visit.thing = self._show(visit.color, visit.shape)
                return
            if visit.leaves == now and visit.thing is not None:
                visit.thing.left = now
                return
        visitors = self._visitors()
        self._most = MAX_PRESENT - (not visitors)  # room for a visitor at any time
        if self._rng.random() < self._event_rate:
            self._event([thing for thing in self.history.present if thing.number not in visitors])

    def _pairs(self) -> list[tuple[int, int]]:
        return [(color, shape) for color, shape in super()._pairs() if shape not in self._kept]

    def _remembered(self, thing: Thing) -> bool:
        return thing.shape in self._kept or super()._remembered(thing)

    def _visitors(self) -> set[int]:
        return {visit.thing.number for visit in self.visits if visit.thing is not None and visit.thing.left is None}


def plan_visits(rng: np.random.Generator, frames: int) -> list[Visit]:
    """Plan the stream's first object and one visit for each of the longest gaps that fit. Raises ValueError if none does."""
    longest = [gap for gap in GAPS if gap * 11 // 10 + 3 * STAYS[1] <= frames][-(AT_MOST - 1) :]
    if not longest:
        raise ValueError(f"{frames} frames are too few for a gap of {GAPS[0]}")
    shapes = rng.permutation(len(SHAPES)).tolist()
    colors = rng.integers(len(COLORS), size=len(SHAPES)).tolist()
    first = Visit(0, int(rng.integers(*STAYS)), colors[0], shapes[0])
    visits = [first]
    for number, gap in enumerate(reversed(longest), 1):
        stay = int(rng.integers(*STAYS))
        leaves = frames - gap + int(rng.integers(-(gap // 10), gap // 10 + 1))
        visits.append(Visit(leaves - stay, leaves, colors[number], shapes[number]))
    return visits
