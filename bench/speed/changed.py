"""The changed patches of a frame alone beside the whole tower, of real size with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgevlm.bench.speed.vision import TOWERS, checkpoint_of, engine_of
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.errors import UserError, nearest
from edgevlm.export.vision import check_precision
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.engine import Int32, TowerBuffer


def changed(
    tower: Sequence[str] = ("siglip-so400m-384",),
    precisions: Sequence[str] = ("fp32", "int8"),
    changed: Sequence[int] = (10, 25, 50, 70, 100),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 3,
    *,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Time frames whole, and with these percentages of their patches ``changed``, in turns; ratios are to the whole tower.

    The patches lie around the middle. Raises UserError for a tower or precision that is not known, and for a percentage that
    is none.
    """
    if unknown := [name for name in tower if name not in TOWERS]:
        raise UserError(f"--tower {unknown[0]!r} is not known; {nearest(unknown[0], TOWERS)}")
    if wrong := [percent for percent in changed if not 1 <= percent <= 100]:
        raise UserError(f"--changed {wrong[0]}: give percentages of 1 to 100")
    for precision in precisions:
        check_precision(precision)
    for name in tower:
        chosen = TOWERS[name].shortened(layers)
        for precision in precisions:
            progress(f"{name}: random weights in {precision}")
            place = {"bench": "changed", "tower": name, "layers": chosen.vision[chosen.depth], "threads": threads}
            with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
                engine, bundle = engine_of(chosen, checkpoint_of(chosen, Path(folder)), Path(folder), precision, threads)
                vision = bundle.vision
                assert vision.changed is not None
                memory = np.zeros(vision.changed.cache_bytes, np.uint8)
                bound = engine.bind_tower(TowerBuffer.of(memory))
                frames = np.random.default_rng(0).standard_normal((vision.group, 3, *vision.size), np.float32)
                one = frames if vision.group > 1 else frames[0]
                jobs = {0: Job(partial(engine.encode, frames), vision.group)}
                for percent in changed:
                    patches = middle(vision.changed.grid, percent / 100)
                    jobs[percent] = Job(partial(bound.encode, one, patches), vision.group)
                progress(f"{name}: timing {precision}")
                took = take_turns(jobs, rounds)
                place |= {"precision": precision, "tower_mb": round(memory.nbytes / 1e6, 1)}
                yield {**place, "encode": "all", "encoded": 1.0, **figures("frame", took[0])}
                for percent in changed:
                    yield {**place, "encode": "changed", "encoded": percent / 100, **figures("frame", took[percent])}
                for percent in changed:
                    against = {"encode": "changed", "encoded": percent / 100, "against": "all"}
                    yield {**place, **against, **ratio(took[percent], took[0])}
                engine.close()


def middle(grid: tuple[int, int], share: float) -> Int32:
    """The patches nearest to the middle of a grid, sorted: ``share`` of all, at least one."""
    rows, columns = np.indices(grid)
    distances = np.hypot(rows - (grid[0] - 1) / 2, columns - (grid[1] - 1) / 2).reshape(-1)
    count = max(1, round(share * distances.size))
    return np.sort(np.argsort(distances, kind="stable")[:count]).astype(np.int32)
