"""A second world, cut from photographs. Its pictures, motion and light differ from the demo's; its questions are the same.

A frame is uint8 [84, 84, 3] RGB, a 4x4 grid of 21-pixel patches. A shape's word names a photographed thing (THINGS), and a
colour's word its tint. A thing wanders about its patch, turns, grows, shrinks and occasionally moves to another patch of its
quadrant, where no other thing is. It may cover four patches, and wires hide up to half of it. The background is a photograph
with pieces of others on it, which pans, shakes and cuts to another. The light swells, switches, and falls from one side. All
pictures come from photos.jpg. Held-out streams (``unseen``) show the same things as training, before different backgrounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.demo.world import GRID, MAX_PRESENT, Thing, World

THINGS = ("shuttle", "coin", "head", "cat", "photographer", "cup", "horse", "helmet")
"""The things that square, circle, triangle, diamond, cross, ring, heart and star stand for in questions."""

ATLAS = Path(__file__).with_name("photos.jpg")
SIZE = 84  # pixels along each side
CELL = SIZE // GRID
HALF = SIZE // 2
GROUND, THING = 128, 40  # pixels of a background and of a thing in the atlas
GROUNDS = 10
BOX = 28  # side in pixels of the square that a thing is drawn in
SIDES = (16.0, 21.0)  # pixels of a thing's longer side
TILT = 0.3  # maximum radians by which a thing is turned, either way
LEASH = 3.0  # maximum pixels that a thing wanders from its patch's centre, either way
DASH = 7.0  # maximum pixels per frame on the way to another patch
CUT_RATE = 1 / 40  # probability per frame that the background changes
SWITCH_RATE = 1 / 30  # probability per frame that the light changes
OWNED = 0.4  # a thing owns the patches with this fraction of its visible pixels, and the one with the most

_TINTS = np.array(
    [
        (235, 30, 40),
        (250, 130, 10),
        (245, 235, 40),
        (30, 190, 50),
        (30, 225, 230),
        (45, 75, 245),
        (175, 50, 215),
        (245, 245, 245),
    ],
    dtype=np.float32,
)  # [8, 3], one row per colour

_Y, _X = np.mgrid[:BOX, :BOX].astype(np.float32) - (BOX - 1) / 2
_RAMP = np.linspace(-1, 1, SIZE, dtype=np.float32)
_GRAIN = np.random.default_rng(0).integers(-9, 10, 1 << 18).astype(np.float32)  # each frame's noise is a section of this


@dataclass(slots=True)
class Pose:
    """A thing's place, in pixels (down, right), and how it is drawn."""

    centre: NDArray[np.float64]
    home: NDArray[np.float64]  # its patch's centre, about which it wanders
    angle: float  # radians
    side: float  # pixels
    tint: NDArray[np.float32]
    flip: int  # 1, or -1 for the mirror image


@dataclass(slots=True)
class Backdrop:
    """A background and the wires before it. ground: float32 ``[3, 2G + 84, 2G + 84]``; the camera sees a window of it."""

    ground: NDArray[np.float32]
    wires: NDArray[np.bool_]  # [84, 84]: where a wire hides what is behind it
    wire: NDArray[np.float32]  # [3, 84, 84]: the wires' pixels
    corner: NDArray[np.float64]  # the window's, in pixels
    pan: NDArray[np.float64]  # pixels per frame
    shake: float


class PhotoWorld(World):
    """An endless stream of photographed things. ``unseen``: show backgrounds that training never shows."""

    size = SIZE

    def __init__(
        self, seed: int | list[int] = 0, event_rate: float | None = None, hard: bool = False, unseen: bool = False
    ) -> None:
        super().__init__(seed, event_rate, hard)
        self._part = int(unseen)
        self._poses: dict[int, Pose] = {}
        self._shown = np.full(GRID * GRID, -1, dtype=np.int32)
        self.visible: dict[int, float] = {}
        """The fraction of each thing's pixels that is visible in the newest frame."""
        self._backdrop = self._new_backdrop()
        self._lamp, self._phase, self._side = 1.0, float(self._rng.uniform(0, 6)), self._rng.normal(0, 0.2, 2)
        self._cast = self._rng.uniform(0.95, 1.05, 3).astype(np.float32)

    @property
    def owners(self) -> NDArray[np.int32]:
        """The thing that each patch of the newest frame shows, int32 [16], row-major; -1 for none or too little of one."""
        return self._shown

    def step(self) -> NDArray[np.uint8]:
        """Advance the world and return its next frame, uint8 [84, 84, 3] RGB."""
        self.skip()
        return self._render()

    def skip(self) -> None:
        self.history.now += 1
        for thing in self.history.present:
            self._wander(self._poses[thing.number])
        self._move_backdrop()
        self._happen()
        self._poses = {thing.number: self._poses[thing.number] for thing in self.history.present}
        self.history.things = [thing for thing in self.history.things if self._remembered(thing)]

    def _free_cells(self) -> list[int]:
        """Return the patches of quadrants without a thing."""
        taken = {thing.quadrant for thing in self.history.present}
        return [cell for cell in range(GRID * GRID) if cell // GRID // 2 * 2 + cell % GRID // 2 not in taken]

    def _show(self, color: int, shape: int) -> Thing:
        thing, rng = super()._show(color, shape), self._rng
        self._poses[thing.number] = Pose(
            _middle(thing.cell) + rng.uniform(-LEASH, LEASH, 2),
            _middle(thing.cell),
            float(rng.uniform(-TILT, TILT)),
            float(rng.uniform(*SIDES)),
            (_TINTS[color] * rng.uniform(0.92, 1.04) + rng.uniform(-8, 8, 3)).astype(np.float32),
            int(rng.choice((-1, 1))),
        )
        return thing

    def _hop(self, thing: Thing) -> None:
        """Send a thing to another patch of its quadrant, which takes about three frames."""
        row, column = thing.quadrant // 2 * 2, thing.quadrant % 2 * 2
        cells = [(row + down) * GRID + column + right for down in (0, 1) for right in (0, 1)]
        self._poses[thing.number].home = _middle(self._pick([cell for cell in cells if cell != thing.cell]))

    def _wander(self, pose: Pose) -> None:
        rng = self._rng
        away = pose.centre - pose.home
        inside = away.clip(-LEASH, LEASH)
        pull = (inside - away).clip(-DASH, DASH)
        pose.centre = pose.centre + (pull if pull.any() else rng.normal(0, 0.8, 2))
        pose.angle = min(TILT, max(-TILT, pose.angle + rng.normal(0, 0.05)))
        pose.side = min(SIDES[1], max(SIDES[0], pose.side * (1 + rng.normal(0, 0.02))))

    def _move_backdrop(self) -> None:
        rng, backdrop = self._rng, self._backdrop
        if rng.random() < CUT_RATE:
            self._backdrop = backdrop = self._new_backdrop()
        backdrop.corner = (backdrop.corner + backdrop.pan) % (2 * GROUND)
        if rng.random() < SWITCH_RATE:
            self._lamp = float(rng.uniform(0.6, 1.15))
        self._side = 0.97 * self._side + rng.normal(0, 0.03, 2)

    def _new_backdrop(self) -> Backdrop:
        rng, grounds = self._rng, _atlas()[0][self._part]
        ground = _mirrored(grounds[rng.integers(GROUNDS)])
        for _ in range(rng.integers(8, 17)):  # clutter: thing-sized pieces of other photographs
            piece, at, rim = grounds[rng.integers(GROUNDS)], rng.integers(0, 2 * GROUND - BOX, 2), rng.uniform(0.6, 1.4, 3)
            mask = (_X * rim[0]) ** 2 + (_Y * rim[1]) ** 2 + 8 * _X * np.sin(_Y * rim[2] / 5) < rng.uniform(5, 12) ** 2
            top, left = rng.integers(0, GROUND - BOX, 2)
            hidden = ground[:, at[0] : at[0] + BOX, at[1] : at[1] + BOX]
            np.copyto(hidden, piece[:, top : top + BOX, left : left + BOX], where=mask)
        wires = np.zeros((SIZE, SIZE), bool)
        for _ in range(rng.integers(1, 4)):
            bend, phase, pitch, offset = rng.uniform(0, 6), rng.uniform(0, 6), rng.normal(0, 0.4), rng.uniform(0, SIZE)
            line = offset + bend * np.sin(np.arange(SIZE) / 12 + phase) + pitch * (np.arange(SIZE) - HALF)
            near = np.abs(np.arange(SIZE)[:, None] - line) < rng.uniform(1, 2)
            wires |= near if rng.random() < 0.5 else near.T
        still = rng.random() < 0.3
        return Backdrop(
            np.pad(ground, ((0, 0), (0, SIZE), (0, SIZE)), mode="wrap") * np.float32(rng.uniform(0.5, 0.85)),
            wires,
            grounds[rng.integers(GROUNDS)][:, :SIZE, :SIZE] * np.float32(rng.uniform(0.3, 0.7)),
            rng.uniform(0, 2 * GROUND, 2),
            np.zeros(2) if still else rng.normal(0, 0.8, 2),
            float(rng.choice((0.0, 0.7))),
        )

    def _render(self) -> NDArray[np.uint8]:
        rng, backdrop = self._rng, self._backdrop
        top, left = (backdrop.corner + backdrop.shake * rng.normal(0, 1, 2)).astype(int) % (2 * GROUND)
        frame = backdrop.ground[:, top : top + SIZE, left : left + SIZE].copy()
        np.copyto(frame, backdrop.wire, where=backdrop.wires)
        shown = np.zeros((MAX_PRESENT, GRID * GRID))
        present = self.history.present
        self.visible = {}
        for place, thing in enumerate(present):
            pose = self._poses[thing.number]
            grey, mask = _drawn(thing.shape, pose)
            at = np.rint(pose.centre - (BOX - 1) / 2).astype(int)
            first, last = np.maximum(at, 0), np.minimum(at + BOX, SIZE)
            here = slice(first[0], last[0]), slice(first[1], last[1])
            inside = slice(first[0] - at[0], last[0] - at[0]), slice(first[1] - at[1], last[1] - at[1])
            plain = np.zeros((SIZE, SIZE), bool)
            plain[here] = mask[inside] & ~backdrop.wires[here]
            if plain.sum() < mask[inside].sum() / 2:
                plain[here] = mask[inside]  # the thing passes before wires that would hide it
            painted = (0.45 + 0.55 * grey[inside]) * pose.tint[:, None, None]
            np.copyto(frame[:, here[0], here[1]], painted, where=plain[here])
            shown[place] = plain.reshape(GRID, CELL, GRID, CELL).sum((1, 3)).reshape(-1)
            self.visible[thing.number] = float(shown[place].sum() / mask.sum())
        self._shown = np.full(GRID * GRID, -1, dtype=np.int32)
        for thing, pixels in zip(present, shown, strict=False):
            thing.cell = int(pixels.argmax())
            self._shown[pixels >= OWNED * pixels.sum()] = self._shown[thing.cell] = thing.number
        swell = np.float32(self._lamp) * np.float32(1 + 0.12 * np.sin(self.history.now / 9 + self._phase))
        down, right = self._side.astype(np.float32)
        light = swell * (1 + down * _RAMP[:, None] + right * _RAMP)
        frame *= light.clip(0.45, 1.3)
        frame *= self._cast[:, None, None]
        at_random = int(rng.integers(len(_GRAIN) - frame.size))
        frame += _GRAIN[at_random : at_random + frame.size].reshape(frame.shape)
        return np.ascontiguousarray(frame.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def _middle(cell: int) -> NDArray[np.float64]:
    """Return a patch's centre, in pixels (down, right)."""
    return (np.array(divmod(cell, GRID)) + 0.5) * CELL


def _drawn(shape: int, pose: Pose) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return a thing's grey levels, float32 in 0..1, and its mask, both ``[BOX, BOX]``."""
    scale = THING / pose.side
    cos, sin = scale * np.cos(pose.angle), scale * np.sin(pose.angle)
    middle = (THING - 1) / 2
    down = np.rint(middle + cos * _Y + sin * _X).astype(int)
    right = np.rint(middle + pose.flip * (cos * _X - sin * _Y)).astype(int)
    inside = (down >= 0) & (down < THING) & (right >= 0) & (right < THING)
    greys, masks = _atlas()[1]
    down, right = down.clip(0, THING - 1), right.clip(0, THING - 1)
    return greys[shape][down, right], masks[shape][down, right] & inside


def _mirrored(ground: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mirror a picture to twice its height and width, so that it repeats without seams."""
    wide = np.concatenate([ground, ground[..., ::-1]], axis=2)
    return np.concatenate([wide, wide[:, ::-1]], axis=1)


@cache
def _atlas() -> tuple[NDArray[np.float32], tuple[NDArray[np.float32], NDArray[np.bool_]]]:
    """Return the training and unseen backgrounds, float32 ``[2, 10, 3, G, G]`` RGB, and the things' grey levels and masks."""
    import cv2

    picture = np.asarray(cv2.imread(str(ATLAS)))[..., ::-1]
    parts = picture[: 2 * GROUND].reshape(2, GROUND, GROUNDS, GROUND, 3).transpose(0, 2, 4, 1, 3)
    bands = picture[2 * GROUND :, : THING * len(THINGS), 0].reshape(2, THING, len(THINGS), THING).transpose(0, 2, 1, 3)
    return parts.astype(np.float32), (bands[0].astype(np.float32) / 255, bands[1] > 127)
