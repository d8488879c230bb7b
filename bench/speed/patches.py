"""What telling changed patches takes, and what undoing a camera's shaking and exposure saves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from edgevlm.bench.clips import Image, open_clip
from edgevlm.bench.timing import Job, figures, time_job, timed
from edgevlm.progress import Notify
from edgevlm.runtime import kernels
from edgevlm.runtime.bundle import VisionSpec
from edgevlm.runtime.changes import Float32, PatchChanges
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.settings import EncodeChanged

SIDE, GRID = 384, (27, 27)  # SigLIP-400M's
SHAKEN = 2.0  # pixels, standard deviation of the clip's frames


class PlainChanges(PatchChanges):
    """Without a camera's doing undone."""

    def _explanations(self, *_: object) -> Iterator[Any]:
        return iter(())


def patches(
    clips: Sequence[str] = ("room", "street", "moving"),
    frames: Sequence[int] = (64,),
    threads: int = 1,
    fps: float = 2.0,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each clip, as it is and shaken: frames of 384x384 in 27x27 patches.

    ``kernel_ms``: one comparison of a frame with its references; ``ms_per_frame``: all that is done to choose the patches;
    ``encoded_plain``: what would be encoded if shifts and exposure were not undone. Raises UserError for an invalid clip.
    """
    kernels.set_threads(threads)
    vision = VisionSpec("", (SIDE, SIDE), "stretch", None, "bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 729, GRID, None)
    prepare = Preprocessor(vision)
    for name in clips:
        for shaken in (False, True):
            clip = f"{name}, shaken" if shaken else name
            progress(f"{clip}: {max(frames)} frames")
            images = open_clip(name, fps)
            pictures = [prepare(image)[None] for image in islice(_shaken(images) if shaken else images, max(frames))]
            changes, plain = PatchChanges(EncodeChanged(), vision, GRID), PlainChanges(EncodeChanged(), vision, GRID)
            encoded: list[float] = []
            took = [time_job(Job(partial(_step, changes, pixels, encoded))) for pixels in pictures]
            without: list[float] = []
            for pixels in pictures:
                _step(plain, pixels, without)
            levels = changes.compare(pictures[0], (1, 1)).levels
            kernel = [timed(partial(kernels.patch_distances, levels, levels, levels, *GRID)) for _ in pictures]
            yield {
                "bench": "patches", "clip": clip, "frames": max(frames), "kernel_ms": round(statistics.median(kernel), 3),
                **figures("frame", took[1:]), "encoded": round(float(np.mean(encoded)), 4),
                "encoded_plain": round(float(np.mean(without)), 4), "threads": threads,
            }  # fmt: skip


def _step(changes: PatchChanges, pixels: Float32, encoded: list[float]) -> None:
    found = changes.compare(pixels, (SIDE, SIDE))
    changes.encoded(found)
    encoded.append(float(found.patches.mean()))


def _shaken(images: Iterator[Image]) -> Iterator[Image]:
    random = np.random.default_rng(0)
    for image in images:
        yield np.roll(image, tuple(np.rint(random.normal(0, SHAKEN, 2)).astype(int)), (0, 1))
