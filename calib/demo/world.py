"""The demo camera: an endless world of coloured shapes, generated from a seed in constant memory.

A frame is uint8 [56, 56, 3] RGB, a 4x4 grid of 14-pixel cells. A cell is one patch of the vision tower and holds at most one
object. Objects are 11-pixel sprites that drift inside their cell. In each frame, at most one object enters, leaves or hops to a
free cell of its quadrant. At most three objects are shown at once. The background is still. In a hard world, the background
moves by one pixel per frame and is sometimes replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

import numpy as np

from edgevlm.runtime.taught import COLORS, SHAPES

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")

SIZE = 56
GRID = 4
CELL = SIZE // GRID
SPRITE = 11
MAX_PRESENT = 3
MIN_STAY = 3
EVENT_RATE, HARD_EVENT_RATE = 1 / 6, 0.3  # entries, departures and hops per frame
CUT_RATE = 1 / 24
WINDOW = 160  # frames after an object leaves until its colour-shape pair may come again

Item = TypeVar("Item")

_GLIDES = [glide for glide in product((-1, 0, 1), repeat=2) if any(glide)]  # (down, right), pixels per frame

# [8, 3], one row per colour; with jitter (8) and noise (15), all values stay below 256
_RGB = np.array(list(bytes.fromhex("cd1919e17305dcd71919a02819c8cd283cdc9123b9e1e1e1")), np.int16).reshape(8, 3)


@dataclass(slots=True)
class Thing:
    """An object, shown in frames ``[entered, left)``. An object's colour, shape and quadrant never change."""

    number: int  # 0 for the first object of the stream, counting up
    color: int
    shape: int
    cell: int  # 0..15, row-major; after the object has left, its last cell
    entered: int
    left: int | None = None
    offset: tuple[int, int] = (0, 0)  # pixels (down, right) inside the cell
    rgb: tuple[int, ...] = (0, 0, 0)

    @property
    def quadrant(self) -> int:
        """Return the index into QUADRANTS of the object's quadrant."""
        row, column = divmod(self.cell, GRID)
        return 2 * (row // 2) + column // 2

    @property
    def name(self) -> str:
        return f"{COLORS[self.color]} {SHAPES[self.shape]}"


@dataclass(slots=True)
class History:
    """The objects shown up to frame ``now``, except for those that left at least WINDOW frames ago."""

    now: int = -1
    things: list[Thing] = field(default_factory=list)  # in order of entry
    first: Thing | None = None
    shown: set[tuple[int, int]] = field(default_factory=set)  # every (colour, shape) ever shown, at most 64
    entries: int = 0

    @property
    def present(self) -> list[Thing]:
        return [thing for thing in self.things if thing.left is None]

    @property
    def gone(self) -> list[Thing]:
        return [thing for thing in self.things if thing.left is not None]

    @property
    def complete(self) -> bool:
        """Return whether ``things`` still lists every object shown so far."""
        return self.entries == len(self.things)

    def snapshot(self) -> "History":
        return History(self.now, [replace(thing) for thing in self.things], self.first, set(self.shown), self.entries)


class World:
    """An endless stream of frames. ``step`` makes the next frame, and ``history`` lists the objects shown so far."""

    size = SIZE  # a frame's height and width in pixels

    def __init__(self, seed: int | list[int] = 0, event_rate: float | None = None, hard: bool = False):
        """Start a stream with ``event_rate`` events per frame.

        If ``hard``, the background moves and is sometimes replaced, and the default rate is HARD_EVENT_RATE.
        """
        self.history = History()
        self._rng = np.random.default_rng(seed)
        self._event_rate = event_rate or (HARD_EVENT_RATE if hard else EVENT_RATE)
        self._texture = _texture(self._rng)
        self._most = MAX_PRESENT
        self._hard = hard
        self._glide = self._pick(_GLIDES) if hard else (0, 0)

    @property
    def owners(self) -> np.ndarray:
        """Return which object each patch of the newest frame shows, or -1. The result is int32 [16], row-major."""
        owners = np.full(GRID * GRID, -1, dtype=np.int32)
        for thing in self.history.present:
            owners[thing.cell] = thing.number
        return owners

    @property
    def occupied(self) -> np.ndarray:
        """Return which patches of the newest frame hold an object. The result is bool [16], row-major."""
        return self.owners >= 0

    def step(self) -> np.ndarray:
        """Advance the world by one frame and return the frame, uint8 [56, 56, 3] RGB."""
        history = self.history
        history.now += 1
        for thing in history.present:
            down, right = np.clip(thing.offset + self._rng.integers(-1, 2, size=2), 0, CELL - SPRITE).tolist()
            thing.offset = (down, right)
        if self._hard:
            self._move_background()
        self._happen()
        history.things = [thing for thing in history.things if self._remembered(thing)]
        return self._render()

    def skip(self) -> None:
        self.step()

    def _happen(self) -> None:
        if self._rng.random() < (self._event_rate if self.history.entries else 0.5):
            self._event(self.history.present)

    def _remembered(self, thing: Thing) -> bool:
        return thing.left is None or self.history.now - thing.left < WINDOW

    def _move_background(self) -> None:
        if self._rng.random() < CUT_RATE:
            self._texture, self._glide = _texture(self._rng), self._pick(_GLIDES)
        self._texture = np.roll(self._texture, self._glide, axis=(0, 1))

    def _event(self, present: list[Thing]) -> None:
        """At random, let a new object enter, or let an object that is shown leave or hop."""
        leavers = [thing for thing in present if self.history.now - thing.entered >= MIN_STAY]
        weights = np.array([0.42 * (len(self.history.present) < self._most), 0.38 * bool(leavers), 0.2 * bool(present)])
        if not weights.any():
            return
        event = self._rng.choice(3, p=weights / weights.sum())
        if event == 0:
            self._enter()
        elif event == 1:
            self._pick(leavers).left = self.history.now
        else:
            self._hop(self._pick(present))

    def _enter(self) -> None:
        recent = {(thing.color, thing.shape) for thing in self.history.things}
        pairs = [pair for pair in self._pairs() if pair not in recent]
        if pairs:  # a very busy stream can run out of colour-shape pairs
            self._show(*self._pick(pairs))

    def _pairs(self) -> list[tuple[int, int]]:
        return list(product(range(len(COLORS)), range(len(SHAPES))))

    def _show(self, color: int, shape: int) -> Thing:
        history, rng = self.history, self._rng
        thing = Thing(history.entries, color, shape, self._pick(self._free_cells()), history.now)
        down, right = rng.integers(0, CELL - SPRITE + 1, size=2).tolist()
        thing.offset, thing.rgb = (down, right), tuple((_RGB[color] + rng.integers(-8, 9, size=3)).clip(0).tolist())
        history.things.append(thing)
        history.shown.add((color, shape))
        history.first = history.first or replace(thing)
        history.entries += 1
        return thing

    def _free_cells(self) -> list[int]:
        return np.flatnonzero(~self.occupied).tolist()

    def _hop(self, thing: Thing) -> None:
        row, column = thing.cell // GRID // 2 * 2, thing.cell % GRID // 2 * 2
        cells = [(row + down) * GRID + column + right for down in (0, 1) for right in (0, 1)]
        free = [cell for cell in cells if not self.occupied[cell]]
        if free:
            thing.cell = self._pick(free)

    def _pick(self, items: list[Item]) -> Item:
        return items[int(self._rng.integers(len(items)))]

    def _render(self) -> np.ndarray:
        frame = self._texture.copy()
        for thing in self.history.present:
            top = thing.cell // GRID * CELL + thing.offset[0]
            left = thing.cell % GRID * CELL + thing.offset[1]
            frame[top : top + SPRITE, left : left + SPRITE][_MASKS[thing.shape]] = thing.rgb
        frame += self._rng.integers(0, 16, size=frame.shape, dtype=np.uint8)
        return frame


def _texture(rng: np.random.Generator) -> np.ndarray:
    """Return a dark, tinted, blotchy background with values from 20 to 100, uint8 [56, 56, 3]."""
    coarse = rng.integers(-14, 15, size=(GRID * 2, GRID * 2, 1)).repeat(CELL // 2, axis=0).repeat(CELL // 2, axis=1)
    fine = rng.integers(-6, 7, size=(SIZE, SIZE, 1))
    base = rng.integers(40, 81) + rng.integers(-8, 9, size=3)
    return (base + coarse + fine).clip(20, 100).astype(np.uint8)


def _masks() -> np.ndarray:
    y, x = np.mgrid[-1 : 1 : SPRITE * 1j, -1 : 1 : SPRITE * 1j]
    radius, angle = np.hypot(x, y), np.arctan2(x, -y)
    lobe = np.abs((angle / (2 * np.pi) * 5) % 1 - 0.5) * 2  # 1 on the star's five spikes, 0 between
    masks = {
        "square": np.maximum(abs(x), abs(y)) <= 0.85,
        "circle": radius <= 0.95,
        "triangle": abs(x) <= (y + 1) / 2 + 0.05,
        "diamond": abs(x) + abs(y) <= 1.05,
        "cross": np.minimum(abs(x), abs(y)) <= 0.25,
        "ring": (radius <= 1.05) & (radius >= 0.6),
        "heart": (np.hypot(abs(x) - 0.5, y + 0.45) <= 0.56) | ((y > -0.45) & (abs(x) <= (1 - y) / 1.4)),
        "star": radius <= 0.42 + 0.63 * lobe**1.5,
    }
    return np.stack([masks[shape] for shape in SHAPES])


_MASKS = _masks()


STAYS = (8, 24)  # the shortest and the longest stay of a visitor, in frames

GAPS = (30, 100, 300, 1_000, 3_000, 10_000, 30_000)
"""Approximate numbers of frames from a visitor's leaving to the end of the stream."""

AT_MOST = 5  # the largest number of visitors; three shapes remain for all other objects


@dataclass(slots=True)
class Visit:
    """A visitor: an object that is shown only in frames ``[enters, leaves)``."""

    enters: int
    leaves: int
    color: int
    shape: int
    thing: Thing | None = field(default=None, compare=False)  # set when the visitor enters


class LongWorld(World):
    """A world for long streams, with planned ``visits``. All other objects come and go as in :class:`World`.

    A visitor's shape is unique, so a question about the visitor has one answer however long ago the visit was.
    """

    def __init__(self, seed: int | list[int], visits: Sequence[Visit]) -> None:
        super().__init__(seed)
        self.visits = list(visits)
        self._kept = {visit.shape for visit in visits}

    def _happen(self) -> None:
        now = self.history.now
        for visit in self.visits:
            if visit.enters == now:
                visit.thing = self._show(visit.color, visit.shape)
                return
            if visit.leaves == now and visit.thing is not None:
                visit.thing.left = now
                return
        visitors = self._visitors()
        self._most = MAX_PRESENT - (not visitors)  # always leave room for a visitor
        if self._rng.random() < self._event_rate:
            self._event([thing for thing in self.history.present if thing.number not in visitors])

    def _pairs(self) -> list[tuple[int, int]]:
        return [(color, shape) for color, shape in super()._pairs() if shape not in self._kept]

    def _remembered(self, thing: Thing) -> bool:
        return thing.shape in self._kept or super()._remembered(thing)

    def _visitors(self) -> set[int]:
        return {visit.thing.number for visit in self.visits if visit.thing is not None and visit.thing.left is None}


def plan_visits(rng: np.random.Generator, frames: int) -> list[Visit]:
    """Plan a visit of the first object, and one more visit for each of the longest GAPS that the stream has room for.

    Raises ValueError if the stream is too short for the smallest of GAPS.
    """
    longest = [gap for gap in GAPS if gap * 11 // 10 + 3 * STAYS[1] <= frames][-(AT_MOST - 1) :]
    if not longest:
        raise ValueError(f"{frames} frames are too few for a gap of {GAPS[0]} frames")
    shapes = rng.permutation(len(SHAPES)).tolist()
    colors = rng.integers(len(COLORS), size=len(SHAPES)).tolist()
    first = Visit(0, int(rng.integers(*STAYS)), colors[0], shapes[0])
    visits = [first]
    for number, gap in enumerate(reversed(longest), 1):
        stay = int(rng.integers(*STAYS))
        leaves = frames - gap + int(rng.integers(-(gap // 10), gap // 10 + 1))
        visits.append(Visit(leaves - stay, leaves, colors[number], shapes[number]))
    return visits
