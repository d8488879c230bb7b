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


def test_it_opens_and_closes_beyond_the_thresholds_and_not_between_them():
    state = WatchState(watch(open_above=0.7, close_below=0.3))
    observed = [(0, 0.5), (1, 0.7), (2, 0.71), (3, 0.5), (4, 0.3), (5, 0.69), (6, 0.29), (7, 0.5)]
    assert changes(state, observed) == [(2, "open"), (6, "close")]


def test_between_the_thresholds_it_is_not_sure():
    state = WatchState(watch(open_above=0.7, close_below=0.3))
    assert state.answer is None
    for probability, answer in [(0.9, "yes"), (0.5, "not sure"), (0.7, "not sure"), (0.3, "not sure"), (0.1, "no")]:
        state.observe(0, probability)
        assert state.answer == answer


def test_without_a_band_it_flaps_where_with_one_it_does_not():
    noisy = [(time, 0.5 + (0.05 if time % 2 else -0.05)) for time in range(20)]
    assert len(changes(WatchState(watch(open_above=0.5, close_below=0.5)), noisy)) == 19
    assert changes(WatchState(watch(open_above=0.6, close_below=0.4)), noisy) == []


def test_it_holds_for_as_long_as_it_must():
    state = WatchState(watch(open_after=2, close_after=3))
    short = [(0, 0.9), (1, 0.9), (1.5, 0.5), (2, 0.9), (3, 0.9)]
    assert changes(state, short) == []
    assert changes(state, [(4, 0.9), (5, 0.1), (7.5, 0.1), (8, 0.1)]) == [(4, "open"), (8, "close")]


def test_unless_told_otherwise_one_answer_alone_changes_nothing():
    state = WatchState(Watch(question="is there a red square?"))
    assert changes(state, [(0, 0.9), (0.5, 0.1), (1, 0.9), (1.5, 0.9), (2, 0.1), (2.5, 0.1)]) == [(1.5, "open"), (2.5, "close")]


def test_a_hold_begins_anew_after_a_camera_was_down():
    state = WatchState(watch(open_after=10))
    assert changes(state, [(0, 0.9), (3600, 0.9), (3609, 0.9), (3610, 0.9)]) == [(3610, "open")]


def test_an_open_watch_stays_open_while_a_camera_is_down():
    state = WatchState(watch())
    assert changes(state, [(0, 0.9), (3600, 0.9), (3601, 0.1)]) == [(0, "open"), (3601, "close")]


def test_a_hold_begins_anew_where_the_clock_is_set_back():
    state = WatchState(watch(open_after=10))
    assert changes(state, [(100, 0.9), (105, 0.9), (50, 0.9), (59, 0.9), (60, 0.9)]) == [(60, "open")]


def test_after_it_closed_it_cools_down():
    state = WatchState(watch(cooldown=10))
    observed = [(0, 0.9), (1, 0.1), (2, 0.9), (10, 0.9), (11, 0.9), (12, 0.1)]
    assert changes(state, observed) == [(0, "open"), (1, "close"), (11, "open"), (12, "close")]


def test_a_cooldown_does_not_outlast_a_clock_that_is_set_back():
    state = WatchState(watch(cooldown=10))
    assert changes(state, [(1000, 0.9), (1001, 0.1), (5, 0.9)]) == [(1000, "open"), (1001, "close"), (5, "open")]


def test_it_closes_where_its_schedule_ends():
    state = WatchState(watch())
    assert not state.end(0)
    state.observe(1, 0.9)
    assert state.end(2)
    assert (state.is_open, state.answer) == (False, None)


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


@pytest.mark.parametrize(
    "schedule", ["", "monday", "mon-fri 8:00-18:00", "mon 25:00-26:00", "mon 08:60-09:00", "fun", "mon 08:00"]
)
def test_what_is_no_schedule_is_refused(schedule):
    with pytest.raises(ValidationError, match=r"schedule"):
        watch(schedule=[schedule])


def test_settings_that_do_not_fit_together_are_refused():
    for wrong, named in [
        ({"open_above": 0.3}, "close_below"),
        ({"answer": ["maybe"]}, "answer"),
        ({"choices": ["a", "b"], "answer": ["a", "b"]}, "answer"),
        ({"choices": ["a", "a"]}, "choices"),
        ({"every": -1}, "every"),
        ({"cooldown": float("nan")}, "cooldown"),
        ({"open_above": 1.0}, "open_above"),
        ({"name": "Red Square"}, "name"),
    ]:
        with pytest.raises(ValidationError) as refused:
            watch(**wrong)
        assert refused.value.errors()[0]["loc"][0] == named


def test_a_watch_is_named_after_its_question():
    assert watch().name == "is-there-a-red-square"
    assert Watch(question="¿?").name == "watch"
