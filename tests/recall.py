"""Which questions about the past a long stream of the demo answers rightly: by what they ask, and how often it was shown.

``python tests/recall.py auto --frames 12000`` asks one of each kind every 25 frames, and prints right answers of all by frames
watched. The demo's world shows a colour and shape again 160 frames after it left, at the earliest; the newest counts.
"""

import argparse
from collections import Counter, defaultdict

import numpy as np

from edgevlm.calib.demo.questions import is_about_now, sample
from edgevlm.calib.demo.world import World
from edgevlm.runtime.session import Session
from edgevlm.runtime.taught import parse

ASK_EVERY = 25
MARKS = (500, 1000, 2000, 4000, 8000, 12_000, 24_000, 48_000)


def fitting(kind, question, shown):
    """How often the stream has shown what a question asks about."""
    if kind in ("first_shape", "first_color", "left_last", "before", "count_color"):
        return kind.partition("_")[0]
    count = sum(question.color in (None, color) and question.shape in (None, shape) for color, shape in shown.values())
    return ("never shown", "shown once")[count] if count < 2 else "shown several times"


def watch(session, frames):
    """Right answers and all, by mark and group."""
    world, drawn, shown = World(0), np.random.default_rng(1), {}
    found = defaultdict(Counter)
    for number in range(frames):
        session.watch(world.step(), number / 2)
        shown |= {thing.number: (thing.color, thing.shape) for thing in world.history.things}
        if number % ASK_EVERY == 0:
            until = next(mark for mark in (*MARKS, frames) if number < mark)
            for kind, text, answer in sample(world.history, drawn):
                if not is_about_now(kind):
                    right = session.ask(text).text.strip() == answer
                    found[until, fitting(kind, parse(text), shown)][right] += 1
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("policy")
    options.add_argument("--frames", type=int, default=12_000)
    options.add_argument("--budget", type=int, default=512)
    given = options.parse_args()
    with Session.open(policy=given.policy, budget=given.budget) as session:
        for (until, group), counts in sorted(watch(session, given.frames).items()):
            print(f"to frame {until:6}  {group:20} {counts[True]:5} of {counts.total():5} right")
