"""The changed patches of a frame alone beside the whole tower, of real size with random weights: time, and features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgevlm.bench.clips import Image, open_clip
from edgevlm.bench.speed.vision import TOWERS, checkpoint_of, engine_of
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.errors import UserError, nearest
from edgevlm.export.vision import check_precision
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.changes import ChangedEncoder, unit_features
from edgevlm.runtime.engine import Engine, Int32, TowerBuffer
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.settings import CHANGED, EncodeChanged, parse_encode


def changed(
    tower: Sequence[str] = ("siglip-so400m-384",),
    precisions: Sequence[str] = ("fp32", "int8"),
    changed: Sequence[int] = (10, 25, 50, 70, 100),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 3,
    clips: Sequence[str] = (),
    encode: Sequence[str] = (CHANGED,),
    frames: Sequence[int] = (32,),
    fps: float = 2.0,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Time frames whole, and with these percentages of their patches ``changed``, in turns; ratios are to the whole tower.

    The patches lie around the middle. With ``clips`` nothing is timed: each is watched by each setting of ``encode``, and
    features are compared with the whole tower's. Raises UserError for a tower, precision, clip or setting that is not
    known, and for an invalid percentage.
    """
    settings = [parse_encode(text).changed for text in encode]
    for clip in clips:
        open_clip(clip, fps)
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
                place["precision"] = precision
                if clips:
                    for clip in clips:
                        progress(f"{name}: {max(frames)} frames of {clip} in {precision}")
                        images = list(islice(open_clip(clip, fps), max(frames)))
                        for line in compared_features(engine, bundle, settings, images):
                            yield {**place, "clip": Path(clip).name, "frames": len(images), **line}
                    engine.close()
                    continue
                memory = np.zeros(vision.changed.cache_bytes, np.uint8)
                bound = engine.bind_tower(TowerBuffer.of(memory))
                noise = np.random.default_rng(0).standard_normal((vision.group, 3, *vision.size), np.float32)
                one = noise if vision.group > 1 else noise[0]
                jobs = {0: Job(partial(engine.encode, noise), vision.group)}
                for percent in changed:
                    patches = middle(vision.changed.grid, percent / 100)
                    jobs[percent] = Job(partial(bound.encode, one, patches), vision.group)
                progress(f"{name}: timing {precision}")
                took = take_turns(jobs, rounds)
                place["tower_mb"] = round(memory.nbytes / 1e6, 1)
                yield {**place, "encode": "all", "encoded": 1.0, **figures("frame", took[0])}
                for percent in changed:
                    yield {**place, "encode": "changed", "encoded": percent / 100, **figures("frame", took[percent])}
                for percent in changed:
                    against = {"encode": "changed", "encoded": percent / 100, "against": "all"}
                    yield {**place, **against, **ratio(took[percent], took[0])}
                engine.close()


def compared_features(
    engine: Engine, bundle: Bundle, settings: Sequence[EncodeChanged], images: Sequence[Image]
) -> Iterator[dict[str, Any]]:
    """A line for each of ``settings``: cosines of a token's features to the whole tower's, in frames not encoded whole.

    ``worst_cosine``: of all tokens; ``low_cosine``: of a hundred tokens one is below it.
    """
    vision, prepare = bundle.vision, Preprocessor(bundle.vision)
    assert vision.changed is not None
    pixels = np.stack([prepare(image) for image in images[: len(images) // vision.group * vision.group]])
    groups = pixels.reshape(-1, vision.group, *pixels.shape[1:])
    full = [unit_features(engine.encode(group)[0]) for group in groups]
    decoder = replace(bundle.decoder, hidden=full[0].shape[-1], deepstack=0)  # as wide as the features
    bundle = replace(bundle, decoder=decoder)
    sizes, patches = np.ones((vision.group, 2), np.int32), prod(vision.changed.grid)
    for each in settings:
        encoder, cosines = ChangedEncoder(engine, bundle, each), []
        for group, exact in zip(groups, full, strict=True):
            before = encoder.computed
            found = unit_features(encoder.encode(group, sizes)[0])
            if encoder.computed - before < patches:
                cosines.append((found * exact).sum(-1))
        flat = np.concatenate(cosines) if cosines else np.ones(1)
        yield {
            "encode": str(each), "encoded": round(encoder.encoded, 4), "cosine": round(float(flat.mean()), 5),
            "low_cosine": round(float(np.quantile(flat, 0.01)), 5), "worst_cosine": round(float(flat.min()), 5),
        }  # fmt: skip


def middle(grid: tuple[int, int], fraction: float) -> Int32:
    """The patches nearest to the middle of a grid, sorted: ``fraction`` of all, at least one."""
    rows, columns = np.indices(grid)
    distances = np.hypot(rows - (grid[0] - 1) / 2, columns - (grid[1] - 1) / 2).reshape(-1)
    count = max(1, round(fraction * distances.size))
    return np.sort(np.argsort(distances, kind="stable")[:count]).astype(np.int32)
