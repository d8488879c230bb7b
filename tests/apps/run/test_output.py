"""What a run prints, and times as people write and read them."""

import json
from datetime import datetime

import pytest
from typer.testing import CliRunner

from edgevlm.apps.run.clock import moment
from edgevlm.cli import app
from edgevlm.errors import UserError

NOW = datetime(2026, 11, 22, 14, 3, 22).timestamp()
COUNT = "how many objects are there now?"


def run(*arguments):
    done = CliRunner().invoke(app, ["run", "--threads", "1", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def test_no_frame_is_named_where_what_would_answer_has_left():
    window = ("--policy", "sliding-window", "--budget", 160, "--append", "all")
    arguments = ("--frames", 96, *window, "--ask", "which shape came first?")
    assert run(*arguments).stdout.endswith("(what would answer this is no longer in memory)\n")
    (answer,) = (line for line in map(json.loads, run(*arguments, "--json").stdout.splitlines()) if line["event"] == "answer")
    assert (answer["evidence"], answer["evidence_held"]) == ([], False)


def test_moments_are_so_long_ago_or_by_the_clock():
    assert [NOW - moment(text, NOW) for text in ("90s", "10m", "1h30m", "1.5h", "2d")] == [90, 600, 5400, 5400, 172_800]
    assert moment("14:03", NOW) == NOW - 22
    assert moment("14:03:23", NOW) == NOW - 86_399  # yesterday's
    assert moment("2026-11-22T14:03:00", NOW) == moment("2026-11-22 14:03", NOW) == NOW - 22
    assert moment("1970-01-02T00:00:00Z", NOW) == 86_400
    for wrong in ("", "10", "m", "-5m", "25:00", "14:60", "yesterday", "9e9d", "99999999999d", "10m 5", "٣m"):
        with pytest.raises(UserError, match="is no time; give 10m, 1h30m, 14:03 or 2026-11-22T14:03"):
            print(moment(wrong, NOW))


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
