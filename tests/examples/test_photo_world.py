"""The photo world: its truth is what its pictures show, and held-out streams have backgrounds of their own."""

from copy import deepcopy

import numpy as np
import pytest

pytest.importorskip("cv2")

from train_demo.photo_world import CELL, SIZE, PhotoWorld

from edgevlm.calib.demo.world import GRID, MAX_PRESENT


def test_same_seed_same_frames():
    one, other, unseen = PhotoWorld(7), PhotoWorld(7), PhotoWorld(7, unseen=True)
    for _ in range(60):
        frame = one.step()
        assert (frame.shape, frame.dtype) == ((SIZE, SIZE, 3), np.uint8)
        np.testing.assert_array_equal(frame, other.step())
        assert not np.array_equal(frame, unseen.step())
    assert one.history == other.history


def test_a_thing_keeps_its_quadrant_to_itself_and_can_be_seen():
    quadrants: dict[tuple[int, int], int] = {}
    cells: dict[tuple[int, int], set[int]] = {}
    seen = []
    for seed in range(10):
        world = PhotoWorld(seed, event_rate=0.4)
        for _ in range(100):
            world.step()
            present = world.history.present
            assert len({thing.quadrant for thing in present}) == len(present) <= MAX_PRESENT
            for thing in present:
                assert quadrants.setdefault((seed, thing.number), thing.quadrant) == thing.quadrant
                assert world.owners[thing.cell] == thing.number
                cells.setdefault((seed, thing.number), set()).add(thing.cell)
                seen.append(world.visible[thing.number])
            assert set(world.owners.tolist()) - {-1} == {thing.number for thing in present}
    assert min(seen) > 0.35
    assert np.mean(np.array(seen) < 0.95) > 0.2, "some are partly hidden"
    assert any(len(of_one) > 1 for of_one in cells.values()), "and some go to other patches"


def test_what_is_shown_is_what_is_told():
    """Against the same frame without the thing: it differs in the thing's patches, and hardly elsewhere."""
    differing = []
    for seed in range(12):
        world = PhotoWorld(seed, event_rate=0.4)
        for _ in range(20):
            world.step()
        for thing in world.history.present:
            with_it, without = deepcopy(world), deepcopy(world)
            next(other for other in without.history.things if other.number == thing.number).left = world.history.now
            changed = np.abs(with_it._render().astype(int) - without._render().astype(int)).max(-1) > 12
            pixels = changed.reshape(GRID, CELL, GRID, CELL).sum((1, 3)).reshape(-1)
            assert pixels[world.owners == thing.number].sum() >= 0.4 * pixels.sum()
            differing.append(int(pixels.sum()))
    assert len(differing) > 12
    assert min(differing) > 25
