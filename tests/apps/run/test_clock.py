"""Times as people write and read them, and questions about them."""

import json
from datetime import datetime

import pytest
from typer.testing import CliRunner

from edgevlm.apps.run.clock import clock_time, moment, split_window
from edgevlm.cli import app
from edgevlm.errors import UserError

NOW = datetime(2026, 11, 22, 14, 3, 22).timestamp()
COUNT = "how many objects are there now?"


def test_moments_are_so_long_ago_or_by_the_clock():
    assert [NOW - moment(text, NOW) for text in ("90s", "10m", "1h30m", "1.5h", "2d")] == [90, 600, 5400, 5400, 172_800]
    assert moment("14:03", NOW) == NOW - 22
    assert moment("14:03:23", NOW) == NOW - 86_399  # yesterday's
    assert moment("2026-11-22T14:03:00", NOW) == moment("2026-11-22 14:03", NOW) == NOW - 22
    assert moment("1970-01-02T00:00:00Z", NOW) == 86_400
    for wrong in ("", "10", "m", "-5m", "25:00", "14:60", "yesterday", "9e9d", "99999999999d", "10m 5", "٣m"):
        with pytest.raises(UserError, match="is no time; give 10m, 1h30m, 14:03 or 2026-11-22T14:03"):
            print(moment(wrong, NOW))


def test_a_moment_is_read_with_how_long_ago_it_was():
    assert clock_time(NOW, NOW) == "14:03:22"
    assert clock_time(NOW - 360, NOW) == "13:57:22 (6 min ago)"
    assert clock_time(NOW - 90_000, NOW) == "Nov 21 13:03:22 (25 h ago)"


def test_a_window_stands_before_its_question():
    assert split_window("/since 10m who came in?") == ("who came in?", {"since": "10m"})
    assert split_window("/since 1h until 14:03 who  came?") == ("who  came?", {"since": "1h", "until": "14:03"})
    assert split_window("who came since 10m?") == ("who came since 10m?", {})
    for wrong in ("/since", "/since 10m", "/since 10m until 5m", "/since 10m until"):
        with pytest.raises(UserError, match="give a time and a question"):
            split_window(wrong)


def run(*arguments):
    return CliRunner().invoke(app, ["run", "--threads", "1", *map(str, arguments)], catch_exceptions=False)


def test_a_run_answers_about_a_window():
    """Evidence of any answer lies in it, and an empty one says so in one line."""
    asked = [
        *("--ask", f"/since 3s {COUNT}"),
        *("--ask", f"/since 9s until 6s {COUNT}"),
        *("--ask", f"/since 1h until 30m {COUNT}"),
    ]
    done = run("--frames", 24, *asked, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    answers = [line for line in lines if line["event"] == "answer"]
    assert done.exit_code == 0
    assert len(answers) == 2
    for answer, since, until in zip(answers, (9, 3), (12, 6), strict=True):
        assert "truth" not in answer
        assert answer["evidence"]
        for seen in answer["evidence"]:
            assert since <= seen["time_s"] <= seen["until_s"] <= until
            assert seen["time"] is None
    empty = [line for line in done.stderr.splitlines() if "holds nothing" in line]
    assert len(empty) == 1
    assert empty[0].endswith("of the stream; it reaches back to 0.5 s")


@pytest.mark.parametrize("asked", ["/since soon " + COUNT, "/since 5m until 10m " + COUNT, "/since 5m"])
def test_a_window_that_is_none_is_refused_before_anything_is_watched(asked):
    with pytest.raises(UserError, match=r"no time|is before|give a time"):
        run("--camera", "demo", "--frames", 10**9, "--ask", asked)
