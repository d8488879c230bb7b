"""Clips that the benches of ``--append`` and ``--encode`` watch: drawn from a seed, or a recording of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.errors import UserError, nearest

Image = NDArray[np.uint8]
SIZE = (480, 640)  # pixels, height and width
NOISE = 2.0  # standard deviation of a sensor's noise, of 255
PEOPLE = 8


class Walker:
    """A person-sized figure that walks to and fro over a scene, a few pixels a frame."""

    def __init__(self, rng: np.random.Generator, size: tuple[int, int], height: float) -> None:
        """height: of the scene's."""
        tall = int(height * size[0])
        self._figure = _texture(rng, (tall, max(2, tall // 2)), 8) // 2 + rng.integers(0, 128, 3, np.uint8)
        self._range = np.subtract(size, self._figure.shape[:2])
        self._at = rng.random(2) * self._range
        self._pace = np.array([0.1, 1.0]) * rng.choice([-1, 1], 2) * 0.02 * size[1]

    def step(self, frame: Image) -> None:
        """Walk on, turn at the edges, and draw the figure."""
        ahead = self._at + self._pace
        self._pace = np.where((ahead < 0) | (ahead > self._range), -self._pace, self._pace)
        self._at = np.clip(ahead, 0, self._range)
        (top, left), (tall, wide) = self._at.astype(int), self._figure.shape[:2]
        frame[top : top + tall, left : left + wide] = self._figure


def still_room(size: tuple[int, int] = SIZE, seed: int = 0) -> Iterator[Image]:
    """A room that stands still under a sensor's noise, and one person in it. Frames uint8 RGB ``[H, W, 3]`` without end."""
    return _fixed(size, seed, [0.15])


def street(size: tuple[int, int] = SIZE, seed: int = 0) -> Iterator[Image]:
    """A street seen by a fixed camera: PEOPLE walk, near and far; about a quarter of the patches changes."""
    return _fixed(size, seed, np.linspace(0.08, 0.2, PEOPLE).tolist())


def moving_camera(size: tuple[int, int] = SIZE, seed: int = 0) -> Iterator[Image]:
    """A camera that pans over a scene, and comes back: everything changes."""
    rng = np.random.default_rng([3, seed])
    scene, number = _texture(rng, (size[0], 3 * size[1]), 48), 0
    while True:
        left = abs((number * size[1] // 12) % (4 * size[1]) - 2 * size[1])
        yield _noisy(rng, scene[:, left : left + size[1]])
        number += 1


def _fixed(size: tuple[int, int], seed: int, heights: list[float]) -> Iterator[Image]:
    rng = np.random.default_rng([len(heights), seed])
    scene = _texture(rng, size, 16)
    walkers = [Walker(rng, size, height) for height in heights]
    while True:
        frame = scene.copy()
        for walker in walkers:
            walker.step(frame)
        yield _noisy(rng, frame)


def _texture(rng: np.random.Generator, size: tuple[int, int], blocks: int) -> Image:
    """Blotches with edges, of about ``blocks`` to a side and finer ones."""
    total = np.full((*size, 3), 96.0)
    for count, swing in ((blocks // 4, 40), (blocks, 25), (4 * blocks, 12)):
        rows, columns = (np.arange(side) * count // side for side in size)
        total += (swing * rng.uniform(-1, 1, (count, count, 3)))[np.ix_(rows, columns)]
    return total.clip(16, 240).astype(np.uint8)


def _noisy(rng: np.random.Generator, frame: Image) -> Image:
    return (frame + NOISE * rng.standard_normal(frame.shape, np.float32)).round().clip(0, 255).astype(np.uint8)


CLIPS: dict[str, Callable[[], Iterator[Image]]] = {"street": street, "room": still_room, "moving": moving_camera}


def open_clip(name: str, fps: float) -> Iterator[Image]:
    """Frames uint8 RGB without end, of one of CLIPS or of a recording, which is played again from its beginning.

    fps: frames taken of a second of a recording. Raises UserError for what is neither.
    """
    if name in CLIPS:
        return CLIPS[name]()
    if not Path(name).exists():
        raise UserError(f"--clips {name}: {nearest(name, CLIPS)}, or a video file")
    return _recording(name, fps)


def _recording(path: str, fps: float) -> Iterator[Image]:
    while True:
        source = open_source(None, path, SourceOptions(fps=fps))
        try:
            count = 0
            for frame in source:
                if frame.image is not None:
                    yield frame.image
                count += 1
        finally:
            source.close()
        if not count:
            raise UserError(f"--clips {path}: has no frame")
