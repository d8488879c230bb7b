"""The suite of long streams: what is asked after the last frame was shown tens, hundreds or thousands of frames ago.

Full KV cannot hold such a stream, nor has the model positions for it: what it can answer is what an oracle makes of the
evidence at a generous budget.
"""

from __future__ import annotations

import numpy as np

from edgevlm.bench.accuracy.streamqa import Exam, Words, as_question
from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.long_world import LongWorld, Visit, plan_visits
from edgevlm.calib.demo.world import COLORS, SHAPES

LONGSTREAM = "longstream"

OF_A_VISIT = ("past_color", "past_where", "past_seen")
OF_THE_FIRST = ("first_color", "first_shape")
OF_NOW = ("now_count", "now_color", "now_where")


def make_long_exam(words: Words, stream: int, frames: int) -> Exam:
    """The ``stream``-th stream of a seed: always the same. Three questions of each visit, and about as many others."""
    rng = np.random.default_rng([*words, stream, 1])
    world = LongWorld([*words, stream], plan_visits(rng, frames) if frames > 1 else [])
    shown, owners = [], []
    for _ in range(frames):
        shown.append(world.step())
        owners.append(world.owners)
    held, asked = np.array(owners, np.int32), []
    for visit in world.visits:
        asked += [_about(visit, kind, world, rng) for kind in OF_A_VISIT]
    asked += [_never(world, rng) for _ in world.visits]
    asked += [pair for kind in (*OF_THE_FIRST, *OF_NOW) if (pair := demo.draw(kind, world.history, rng))]
    return Exam(np.array(shown), held, [as_question(question, answer, world, held) for question, answer in asked])


def gap_name(gap: int | None) -> str | None:
    """``tens``, ``hundreds``, ...: how long ago, in frames; None for what was never shown."""
    names = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
    return None if gap is None else names[min(len(str(gap)), len(names)) - 1]


GAP_NAMES = ("tens", "hundreds", "thousands", "ten thousands")


def _about(visit: Visit, kind: str, world: LongWorld, rng: np.random.Generator) -> tuple[demo.Question, str]:
    """A question of this kind about a visit, and its answer."""
    phrasing = int(rng.integers(len(demo.KINDS[kind].phrasings)))
    has_color = demo.KINDS[kind].has(demo.COLOR)
    question = demo.ask(kind, phrasing, visit.color if has_color else None, visit.shape)
    answer = demo.truth(question, world.history)
    assert answer is not None, "nothing else has its shape"
    return question, answer


def _never(world: LongWorld, rng: np.random.Generator) -> tuple[demo.Question, str]:
    """Whether there was something that never was: a visit's shape in another colour, or a pair that nobody has shown."""
    pairs = [(c, s) for c in range(len(COLORS)) for s in range(len(SHAPES)) if (c, s) not in world.history.shown]
    color, shape = pairs[int(rng.integers(len(pairs)))]
    return demo.ask("past_seen", int(rng.integers(len(demo.KINDS["past_seen"].phrasings))), color, shape), "no"
