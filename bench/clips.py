"""Make video clips for the benchmarks of ``--append`` and ``--encode``. A clip is generated from a seed or read from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.errors import UserError, nearest

Image = NDArray[np.uint8]
SIZE = (480, 640)
NOISE = 2.0  # standard deviation of a sensor's noise, on a scale of 255
FPS = 2.0
CLIPS = {  # name -> people's heights as fractions of the scene's height, or None for a camera that pans over a scene;
    "street": np.linspace(0.08, 0.2, 8).tolist(),  # about a quarter of the street's patches change in each frame
    "room": [0.15],
    "moving": None,
}


class Walker:
    """A person-sized figure that walks back and forth across a scene, a few pixels per frame."""

    def __init__(self, rng: np.random.Generator, height: float) -> None:
        tall = int(height * SIZE[0])
        self._figure = _texture(rng, (tall, max(2, tall // 2)), 8) // 2 + rng.integers(0, 128, 3, np.uint8)
        self._range = np.subtract(SIZE, self._figure.shape[:2])
        self._at = rng.random(2) * self._range
        self._pace = np.array([0.1, 1.0]) * rng.choice([-1, 1], 2) * 0.02 * SIZE[1]

    def step(self, frame: Image) -> None:
        ahead = self._at + self._pace
        self._pace = np.where((ahead < 0) | (ahead > self._range), -self._pace, self._pace)
        self._at = np.clip(ahead, 0, self._range)
        (top, left), (tall, wide) = self._at.astype(int), self._figure.shape[:2]
        frame[top : top + tall, left : left + wide] = self._figure


def open_clip(name: str) -> Iterator[Image]:
    """Yield the frames of a clip endlessly. A video file is repeated.

    ``name``: one of CLIPS, or a video file. Frames are uint8 RGB ``[H, W, 3]``. Raises UserError for an unknown name.
    """
    if name in CLIPS:
        return _drawn(CLIPS[name])
    if not Path(name).exists():
        raise UserError(f"--clips {name}: {nearest(name, CLIPS)}, or a video file")
    return _recording(name)


def _drawn(heights: list[float] | None) -> Iterator[Image]:
    rng, number = np.random.default_rng([len(heights) if heights else 3, 0]), 0
    scene = _texture(rng, SIZE, 16) if heights else _texture(rng, (SIZE[0], 3 * SIZE[1]), 48)
    walkers = [Walker(rng, height) for height in heights or ()]
    while True:
        left = 0 if heights else abs((number * SIZE[1] // 12) % (4 * SIZE[1]) - 2 * SIZE[1])
        frame, number = scene[:, left : left + SIZE[1]].copy(), number + 1
        for walker in walkers:
            walker.step(frame)
        yield (frame + NOISE * rng.standard_normal(frame.shape, np.float32)).round().clip(0, 255).astype(np.uint8)


def _texture(rng: np.random.Generator, size: tuple[int, int], blocks: int) -> Image:
    """Draw a background of sharp-edged blotches. ``blocks``: about how many blotches fit along each side."""
    total = np.full((*size, 3), 96.0)
    for count, swing in ((blocks // 4, 40), (blocks, 25), (4 * blocks, 12)):
        rows, columns = (np.arange(side) * count // side for side in size)
        total += (swing * rng.uniform(-1, 1, (count, count, 3)))[np.ix_(rows, columns)]
    return total.clip(16, 240).astype(np.uint8)


def _recording(path: str) -> Iterator[Image]:
    count = -1
    while count:
        count = 0
        with closing(open_source(None, path, SourceOptions(fps=FPS))) as source:
            for frame in source:
                if frame.image is not None:
                    yield frame.image
                count += 1
    raise UserError(f"--clips {path}: has no frames")
