"""The places that frames take, by layout: worked out by hand. (Whole videos: tests/export/test_families.py.)"""

import numpy as np
import pytest

from edgevlm.runtime.positions import Positions

CLOCK = {"rule": "video", "grid": (2, 3), "tokens_per_second": 2.0, "axes": 3}


class Empty:
    """A cache that holds nothing but positions up to ``last``."""

    def __init__(self, last):
        self.last = last

    def reindex(self, prefix):
        return self.last + 1


def test_a_video_counts_frames_by_the_clock_and_rows_and_columns_from_its_start():
    positions = Positions(2048, 64, **CLOCK, next=10)
    first, second = positions.frame(5.0), positions.frame(7.6)
    assert first.tolist() == [[10, 10, 10], [10, 10, 11], [10, 10, 12], [10, 11, 10], [10, 11, 11], [10, 11, 12]]
    assert second[:, 0].tolist() == [15] * 6  # 2.6 seconds
    assert (second[:, 1:] == first[:, 1:]).all()
    assert positions.take(2).tolist() == [[16] * 3, [17] * 3]


def test_text_after_a_short_video_is_behind_its_columns():
    positions = Positions(2048, 64, **CLOCK, next=10)
    positions.frame(0.0)
    assert positions.next == 13


@pytest.mark.parametrize(("seconds", "place"), [(0.0999999999, 10), (0.1 * 30, 16), (-3.0, 10), (86400.0, 2048 - 512 - 1)])
def test_no_frame_goes_back_or_so_far_that_no_text_would_fit(seconds, place):
    positions = Positions(2048, 64, **CLOCK, next=10)
    positions.frame(0.0)
    assert positions.frame(seconds)[0, 0] == place
    assert positions.next + positions.text_rows <= positions.limit


def test_transformers_counts_on_from_the_last_frame_and_from_the_prompt():
    positions = Positions(2048, 64, **{**CLOCK, "rule": "transformers"}, next=10)
    positions.frame(0.0)
    positions.frame(5.0)
    mark = positions.mark()
    for _ in range(2):
        assert positions.take(4).tolist() == [[13 + row] * 3 for row in range(4)]
        assert positions.take(1).tolist() == [[17] * 3]
        positions.restore(mark)
    assert positions.take(20)[-1].tolist() == [32] * 3
    assert positions.take(1).tolist() == [[33] * 3]


def test_each_frame_has_a_block_of_its_own():
    positions = Positions(2048, 64, rule="frame", grid=(2, 3), axes=3, next=4)
    assert positions.take(3)[-1].tolist() == [6] * 3
    assert positions.frame(1.0)[-1].tolist() == [7, 8, 9]
    assert positions.take(1).tolist() == [[10] * 3]


def test_a_new_video_begins_where_positions_were_made_dense():
    positions = Positions(2048, 64, **CLOCK, next=10)
    positions.frame(0.0)
    positions.frame(300.0)
    positions.compact(Empty(20), 10)
    assert positions.frame(301.0)[0].tolist() == [21, 21, 21]
    assert positions.frame(302.0)[-1].tolist() == [23, 22, 23]


def test_a_mark_brings_everything_back():
    positions = Positions(2048, 64, **CLOCK, next=10)
    positions.frame(0.0)
    mark, expected = positions.mark(), positions.frame(4.0)
    positions.frame(9.0)
    positions.take(5)
    positions.restore(mark)
    assert np.array_equal(positions.frame(4.0), expected)
