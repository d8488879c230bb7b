"""The times of a recording are kept where they can be, and mended where they cannot."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.apps.sources.base import LEAST_S
from edgevlm.apps.sources.video import JUMP_S, RecordedClock

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
