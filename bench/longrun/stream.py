"""The stream that all policies watch: visitors whose absence at each mark is short or long, and what is asked about them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.long_world import STAYS, LongWorld, Visit
from edgevlm.calib.demo.world import COLORS, SHAPES

GAPS = (30, 60, 90, 130, 200, 350, 600, 900, 1_400, 2_500, 4_000, 7_000, 9_000, 20_000, 40_000, 80_000)
"""Frames before a mark at which a visitor has left; of these as many as a mark has room for."""

SHAPES_OF_VISITORS = 6  # the other two are everybody else's
KINDS = ("past_where", "past_seen")  # that need a colour and a shape, which only one visitor has


def plan(seed: int, marks: Sequence[int]) -> tuple[LongWorld, dict[int, list[Visit]]]:
    """The stream of a seed, and the visitors that are asked about at each mark."""
    rng = np.random.default_rng([5_000_000, seed])
    pairs = list(product(range(len(COLORS)), rng.permutation(len(SHAPES))[:SHAPES_OF_VISITORS].tolist()))
    rng.shuffle(pairs)
    asked: dict[int, list[Visit]] = {}
    taken: list[Visit] = []
    for mark in marks:
        asked[mark] = []
        for gap in GAPS:
            stay = int(rng.integers(*STAYS))
            enters, leaves = mark - gap - stay, mark - gap
            free = all(leaves < other.enters or other.leaves < enters for other in taken)
            if enters > 0 and free and pairs:
                color, shape = pairs.pop()
                asked[mark].append(Visit(enters, leaves, color, shape))
                taken.append(asked[mark][-1])
    return LongWorld([5_000_000, seed, 1], sorted(taken, key=lambda visit: visit.enters)), asked


def questions(world: LongWorld, visits: Sequence[Visit], rng: np.random.Generator) -> list[tuple[str, str, int | None]]:
    """Text, answer, and how many frames ago the answer was last shown: of each visit, as many that never were, and of now."""
    asked: list[tuple[str, str, int | None]] = []
    for visit in visits:
        for kind in KINDS:
            question = demo.ask(kind, int(rng.integers(2)), visit.color, visit.shape)
            answer = demo.truth(question, world.history)
            assert answer is not None, "only one visitor has this colour and shape"
            asked.append((question.text, answer, world.history.now - visit.leaves + 1))
    absent = sorted(set(product(range(len(COLORS)), range(len(SHAPES)))) - world.history.shown)
    for _ in visits:
        if absent:
            color, shape = absent[int(rng.integers(len(absent)))]
            asked.append((demo.ask("past_seen", 0, color, shape).text, "no", None))
    now = (demo.draw(kind, world.history, rng) for kind in ("now_count", "now_color", "now_where"))
    return asked + [(question.text, answer, 0) for question, answer in filter(None, now)]
