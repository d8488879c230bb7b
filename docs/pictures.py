"""Draw the pictures of the documents from real runs: ``python docs/pictures.py`` writes docs/assets/*.svg."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from edgevlm import Session
from edgevlm.calib.demo.world import World

ASSETS = Path(__file__).parent / "assets"
FRAMES, BUDGET, PATCHES = 112, 224, 16
SHOWN = ("full", "sliding-window", "infinipot-v", "last-seen")


def held(policy: str) -> np.ndarray:
    """Which patches of which frames a demo stream still holds at its end: share of heads and layers, ``[PATCHES, FRAMES]``."""
    budget = FRAMES * PATCHES if policy == "full" else BUDGET
    with Session.open("demo", policy=policy, budget=budget) as session:
        world = World(seed=3)
        for number in range(FRAMES):
            session.watch(world.step(), number / 2)
        session.flush()
        kept, cache = np.zeros((PATCHES, FRAMES)), session.cache
        for layer in range(cache.layers):
            vision = cache.kind(layer) == 1
            patch = cache.row(layer) * 4 + cache.col(layer)
            np.add.at(kept, (patch[vision], cache.frame(layer)[vision]), 1 / (cache.layers * cache.kv_heads))
    return kept


def memory() -> None:
    """What four policies hold of the same stream."""
    figure, rows = plt.subplots(len(SHOWN), 1, figsize=(9, 5), sharex=True, constrained_layout=True)
    for axis, policy in zip(rows, SHOWN, strict=True):
        kept = held(policy)
        axis.imshow(kept, aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        tokens = "every token" if policy == "full" else f"{BUDGET} of {FRAMES * PATCHES:,} tokens a layer"
        axis.set_title(f"{policy}: {tokens}", loc="left", fontsize=10)
        axis.set_yticks([])
        axis.set_ylabel("patches", fontsize=8)
    rows[-1].set_xlabel("frames, oldest to newest")
    figure.savefig(ASSETS / "memory.svg", metadata={"Date": None})


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    memory()
