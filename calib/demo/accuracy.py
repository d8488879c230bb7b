"""How often the demo model is right, through the exported bundle: `python -m edgevlm.calib.demo.accuracy --streams 200`.

Each held-out stream is watched to its last frame and then asked one question of every kind that has an answer there.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from edgevlm.calib.demo.questions import OFFERED, sample
from edgevlm.calib.demo.world import World
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

ROOM = TextBudget(80, 80, 80)  # enough for what is asked, and no position that a stream needs
HELD_OUT = (1_000_000, 7)  # begins the seeds of the worlds reported on; those of training begin with small numbers


def measure(
    model: Model,
    streams: int,
    frames: int,
    policy: str,
    budget: int | None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    hard: bool = False,
) -> dict[str, list[bool]]:
    """Per kind, one entry a stream in which it could be asked: whether the answer was right."""
    right: dict[str, list[bool]] = defaultdict(list)
    for stream in range(streams):
        world, random = World([*HELD_OUT, stream], hard=hard), np.random.default_rng([*HELD_OUT, stream, 1])
        with Session.open(model, policy=policy, budget=budget, text_budget=ROOM) as session:
            for _ in range(frames):
                session.watch(world.step())
            for kind, question, answer in sample(world.history, random):
                right[kind].append(session.ask(question).text.strip() == answer)
        progress(stream + 1)
    return {kind: right[kind] for kind in OFFERED if kind in right}


def table(right: dict[str, list[bool]]) -> str:
    """A row a kind: share right, half a 95 % interval, and how many were asked (one a stream at most)."""
    lines = [f"{'kind':12} {'right':>6} {'±':>6} {'asked':>6}"]
    for kind, answers in right.items():
        share = float(np.mean(answers))
        half = 1.96 * float(np.sqrt(share * (1 - share) / len(answers)))
        lines.append(f"{kind:12} {share:6.3f} {half:6.3f} {len(answers):6d}")
    return "\n".join(lines)


def main() -> None:
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, or a bundle of it")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--hard", action="store_true", help="streams with a background that moves and is cut")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", type=int)
    options = parser.parse_args()
    model = Model.load(options.model, threads=1)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{options.policy}, {options.frames} frames", total=options.streams)
        right = measure(
            model,
            options.streams,
            options.frames,
            options.policy,
            options.budget,
            lambda done: bar.update(task, completed=done),
            hard=options.hard,
        )
    print(table(right))


if __name__ == "__main__":
    main()
