"""When a watch opens and closes, by probabilities and times alone."""

from datetime import datetime

import pytest
from pydantic import ValidationError

from edgevlm.apps.watches.watch import Watch, WatchState


def watch(**settings):
    return Watch(question="is there a red square?", **{"open_after": 0, "close_after": 0, **settings})


def changes(state, observed):
    """Times at which it opened or closed, of (time, probability) pairs."""
    return [(time, "open" if state.is_open else "close") for time, probability in observed if state.observe(time, probability)]


@pytest.mark.parametrize(
    ("settings", "observed", "wanted"),
    [
        ({"open_above": 0.7, "close_below": 0.3}, [(0, 0.5), (1, 0.7), (2, 0.71), (4, 0.3), (5, 0.69), (6, 0.29)], [2, 6]),
        (
            {"open_after": 2, "close_after": 3},
            [(0, 0.9), (1.5, 0.5), (2, 0.9), (4, 0.9), (5, 0.1), (7.5, 0.1), (8, 0.1)],
            [4, 8],
        ),
        ({"open_after": 0.1}, [(0, 0.9), (0.5, 0.1), (1, 0.9), (1.5, 0.9)], [1.5]),
        ({"open_after": 10}, [(0, 0.9), (3600, 0.9), (3609, 0.9), (3610, 0.9)], [3610]),  # a camera was down
        ({"open_after": 10}, [(100, 0.9), (105, 0.9), (50, 0.9), (59, 0.9), (60, 0.9)], [60]),  # a clock is set back
        ({}, [(0, 0.9), (3600, 0.9), (3601, 0.1)], [0, 3601]),
        ({"cooldown": 10}, [(0, 0.9), (1, 0.1), (2, 0.9), (10, 0.9), (11, 0.9)], [0, 1, 11]),
        ({"cooldown": 10}, [(1000, 0.9), (1001, 0.1), (5, 0.9)], [1000, 1001, 5]),
    ],
)
def test_it_opens_and_closes_beyond_its_thresholds_after_its_holds(settings, observed, wanted):
    assert [time for time, _ in changes(WatchState(watch(**settings)), observed)] == wanted


@pytest.mark.parametrize(
    ("schedule", "inside", "outside"),
    [  # 2026-11-23 is a Monday
        ("mon-fri 08:00-18:00", ["2026-11-23 08:00", "2026-11-27 17:59"], ["2026-11-23 18:00", "2026-11-28 09:00"]),
        ("sat,sun", ["2026-11-28 00:00", "2026-11-29 23:59"], ["2026-11-27 23:59", "2026-11-30 00:00"]),
        ("22:00-06:00", ["2026-11-23 22:00", "2026-11-24 05:59"], ["2026-11-23 06:00", "2026-11-23 21:59"]),
        ("fri 22:00-06:00", ["2026-11-27 22:00", "2026-11-28 05:59"], ["2026-11-27 05:59", "2026-11-28 22:00"]),
        ("sat-mon 00:00-24:00", ["2026-11-28 00:00", "2026-11-30 23:59"], ["2026-12-01 00:00"]),
    ],
)
def test_a_schedule_covers_days_and_times(schedule, inside, outside):
    asked = watch(schedule=[schedule])
    assert [asked.asks(datetime.fromisoformat(time)) for time in inside + outside] == [True] * len(inside) + [False] * len(
        outside
    )


def test_settings_that_do_not_fit_together_are_refused():
    for wrong, named in [
        ({"open_above": 0.3}, "close_below"),
        ({"answer": ["maybe"]}, "answer"),
        ({"choices": ["a", "b"], "answer": ["a", "b"]}, "answer"),
        ({"choices": ["a", "a"]}, "choices"),
        ({"every": -1}, "every"),
        ({"cooldown": float("nan")}, "cooldown"),
        ({"open_above": 1.0}, "open_above"),
        ({"name": "Red\nSquare"}, "name"),
    ]:
        with pytest.raises(ValidationError) as refused:
            watch(**wrong)
        assert refused.value.errors()[0]["loc"][0] == named
