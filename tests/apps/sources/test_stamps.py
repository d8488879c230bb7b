"""A camera's own clock is believed where it can be, and mended where it cannot."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.apps.sources.base import LEAST_S
from edgevlm.apps.sources.live import TOLERANCE_S, StampMender
from edgevlm.apps.sources.video import JUMP_S, RecordedClock


def mend(stamps, arrivals):
    mender = StampMender()
    return [mender(stamp, arrival) for stamp, arrival in zip(stamps, arrivals, strict=True)], mender.mended


STEPS = st.lists(st.floats(0.01, 1), min_size=2, max_size=40)


@given(STEPS, st.floats(-1e6, 1e6), st.randoms(use_true_random=False))
def test_a_regular_clock_passes_unchanged_but_for_its_origin(steps, origin, random):
    own = np.cumsum(steps)
    arrivals = np.maximum.accumulate([time + random.uniform(0, 0.5) for time in own])  # late by the network, in order
    mended, wrong = mend(own + origin, arrivals)
    assert wrong == 0
    assert np.allclose(np.diff(mended), np.diff(own), atol=1e-6)


@given(st.lists(st.tuples(st.floats(LEAST_S, 5), st.one_of(st.none(), st.floats(-1e9, 1e9))), min_size=1, max_size=60))
def test_whatever_a_clock_says_times_increase_and_stay_near_the_arrivals(pictures):
    arrivals = np.cumsum([step for step, _ in pictures])
    mended, _ = mend([stamp for _, stamp in pictures], arrivals)
    assert (np.diff(mended) > 0).all()
    assert (np.abs(np.array(mended) - arrivals) <= TOLERANCE_S + 2 * LEAST_S).all()


def test_jumps_and_repeats_are_counted_and_the_clock_is_believed_again_after_them():
    own = [10.0, 10.1, 10.1, 10.2, 9000.0, 9000.1, 3.0, 3.1]
    arrivals = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    mended, wrong = mend(own, arrivals)
    assert np.allclose(mended, arrivals)
    assert wrong == 3, "one repeat, one jump ahead, one back"


def test_a_clock_that_runs_too_fast_is_set_back_to_the_arrivals():
    arrivals = np.arange(0, 100, 0.1)
    mended, wrong = mend(arrivals * 1.5, arrivals)
    assert wrong > 0
    assert (np.diff(mended) > 0).all()
    assert (np.abs(mended - arrivals) <= TOLERANCE_S + LEAST_S).all()


def test_another_connection_has_another_origin():
    mender = StampMender()
    before = mender(5.0, 1.0)
    mender.restart()
    assert mender(5.2, 31.0) == 31.0 > before, "the stamps of two connections say nothing about each other"


PERIOD = 0.04


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), min_size=1, max_size=60))
def test_whatever_a_recording_says_times_increase_by_no_more_than_is_believed(stamps):
    clock = RecordedClock(PERIOD)
    times = [clock(stamp) for stamp in stamps]
    assert times[0] >= 0
    assert (np.diff(times) > 0).all()
    assert (np.diff(times) <= JUMP_S + LEAST_S).all()


@given(st.lists(st.floats(LEAST_S * 1.01, JUMP_S * 0.99), min_size=1, max_size=40))
def test_the_increasing_times_of_a_recording_are_left_alone(steps):
    stamps = np.cumsum(steps)
    clock = RecordedClock(PERIOD)
    assert np.allclose([clock(stamp) for stamp in stamps], stamps)


def test_what_a_recording_gets_wrong():
    clock = RecordedClock(PERIOD)
    stamps = [0.0, 0.1, 0.05, 0.05, 0.2, 7000.0, 7000.1, 0.3, None, 0.4]
    mended = [0.0, 0.1, 0.101, 0.102, 0.2, 0.24, 0.34, 0.38, 0.42, 0.48]
    assert np.allclose([clock(stamp) for stamp in stamps], mended)
