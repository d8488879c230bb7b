"""The demo cameras: deterministic, endless in constant memory, one object per patch, no pair twice in the window."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from edgevlm.calib.demo.world import CELL, GRID, MAX_PRESENT, MIN_STAY, SIZE, WINDOW, LongWorld, World, plan_visits


def test_same_seed_same_frames():
    one, other, third = World(7), World(7), World(8)
    for _ in range(100):
        frame = one.step()
        np.testing.assert_array_equal(frame, other.step())
        assert frame.shape == (SIZE, SIZE, 3)
        assert frame.dtype == np.uint8
        assert not np.array_equal(frame, third.step())
    assert one.history == other.history


@pytest.mark.parametrize("rate", [1 / 6, 1.0])
def test_rules_of_the_world(rate):
    world = World(3, event_rate=rate)
    quadrants: dict[int, int] = {}
    last_shown: dict[tuple[int, int], int] = {}
    earlier: dict[int, int] = {}  # number -> cell in the frame before
    for time in range(1000):
        world.step()
        present = world.history.present
        cells = {thing.number: thing.cell for thing in present}
        assert world.history.now == time
        assert len(present) <= MAX_PRESENT
        assert len(set(cells.values())) == len(present), "a shared cell"
        changes = [n for n in cells.keys() | earlier.keys() if cells.get(n) != earlier.get(n)]
        assert len(changes) <= 1, "two events in a frame"
        for thing in present:
            assert quadrants.setdefault(thing.number, thing.quadrant) == thing.quadrant
            assert thing.entered <= time
            if thing.entered == time and (thing.color, thing.shape) in last_shown:
                assert time - last_shown[thing.color, thing.shape] > WINDOW - 1, "a pair came again too soon"
            last_shown[thing.color, thing.shape] = time
        for thing in world.history.gone:
            assert thing.left - thing.entered >= MIN_STAY
        earlier = cells


def test_occupied_patches_are_where_the_picture_differs_from_its_background():
    world = World(11)
    frames, occupied = zip(*((world.step(), world.occupied) for _ in range(300)), strict=True)
    frames, occupied = np.stack(frames).astype(int), np.stack(occupied)
    background = np.median(frames, axis=0)
    far = np.abs(frames - background).max(axis=-1) > 30  # [T, 56, 56]; noise spans 15
    patches = far.reshape(-1, GRID, CELL, GRID, CELL).sum(axis=(2, 4)).reshape(-1, GRID * GRID)
    np.testing.assert_array_equal(patches > 20, occupied)


def test_the_background_of_a_hard_world_glides_and_is_cut():
    still, moving = _backgrounds(hard=False), _backgrounds(hard=True)
    assert (still == still[0]).all()
    glides = [
        any((now == np.roll(before, (down, right), axis=(0, 1))).all() for down in (-1, 0, 1) for right in (-1, 0, 1))
        for before, now in pairwise(moving)
    ]
    assert 200 / 60 < glides.count(False) < 200 / 10, "cuts"
    assert all((now != before).any() for before, now in pairwise(moving))


def test_constant_memory_over_ten_thousand_frames():
    world = World(5, event_rate=0.5)
    _watch(world, 9000)
    tracemalloc.start()
    _watch(world, 200)
    before = tracemalloc.get_traced_memory()[0]
    _watch(world, 800)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 8192
    assert len(world.history.things) < 64
    assert not world.history.complete


def _backgrounds(hard: bool) -> np.ndarray:
    """int [200, 56, 56, 3]: the pictures without objects and noise."""
    world, seen = World(4, hard=hard), []
    for _ in range(200):
        world.step()
        seen.append(world._texture.astype(int))
    return np.array(seen)


def _watch(world: World, frames: int) -> None:
    for _ in range(frames):
        world.step()


# Long streams: visitors come once, have a shape of their own, and the rest of the world continues.

FRAMES = 700


@pytest.mark.parametrize("seed", range(4))
def test_a_visitor_is_shown_while_it_visits_and_never_again(seed):
    visits = plan_visits(np.random.default_rng(seed), FRAMES)
    world, again = LongWorld(seed, visits), LongWorld(seed, plan_visits(np.random.default_rng(seed), FRAMES))
    shapes, others = {visit.shape: visit for visit in visits}, 0
    assert len(shapes) == len(visits)
    for time in range(FRAMES):
        np.testing.assert_array_equal(world.step(), again.step())
        present = world.history.present
        assert len(present) <= MAX_PRESENT
        for visit in visits:
            there = [thing for thing in present if thing.shape == visit.shape]
            assert len(there) == (visit.enters <= time < visit.leaves)
            assert all((thing.color, thing.number) == (visit.color, visit.thing.number) for thing in there)
        others += sum(thing.shape not in shapes and thing.entered == time for thing in present)
        assert all(thing.left - thing.entered >= MIN_STAY for thing in world.history.gone)
    assert others > FRAMES / 30, "life goes on"
    assert {visit.thing.number for visit in visits} <= {thing.number for thing in world.history.things}, "and is remembered"
