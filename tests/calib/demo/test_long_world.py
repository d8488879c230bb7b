"""The long demo camera: visitors come once, have a shape of their own, and the rest of the world goes on as ever."""

from itertools import pairwise

import numpy as np
import pytest

from edgevlm.calib.demo.long_world import AT_MOST, STAYS, LongWorld, plan_visits
from edgevlm.calib.demo.world import MAX_PRESENT, MIN_STAY

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


@pytest.mark.parametrize("frames", [110, 500, 2000, 20_000])
def test_visits_leave_gaps_of_many_lengths_and_do_not_meet(frames):
    for seed in range(20):
        visits = plan_visits(np.random.default_rng(seed), frames)
        assert 2 <= len(visits) <= AT_MOST
        assert visits[0].enters == 0
        for one, other in pairwise(visits):
            assert one.leaves < other.enters
        assert all(STAYS[0] <= visit.leaves - visit.enters < STAYS[1] for visit in visits)
        gaps = [frames - visit.leaves for visit in visits[1:]]
        assert 27 <= gaps[-1] <= 3300
        assert gaps[0] > frames / 8


def test_a_stream_without_room_for_a_gap_is_refused():
    with pytest.raises(ValueError, match="60 frames are too few for a gap of 30"):
        plan_visits(np.random.default_rng(0), 60)


def test_without_visits_it_is_a_world_of_all_pairs():
    world, seen = LongWorld(2, []), set()
    for _ in range(2000):
        world.step()
        seen |= {(thing.color, thing.shape) for thing in world.history.present}
    assert len(seen) > 32
