"""What a run says in text."""

import json
import re

from typer.testing import CliRunner

from edgevlm.cli import app

COUNT = "how many objects are there now?"


def run(*arguments):
    done = CliRunner().invoke(app, ["run", "--threads", "1", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def test_quiet_leaves_answers_alone():
    done = run("--frames", 20, "--ask", COUNT, "--quiet")
    assert re.fullmatch(rf"\[10\.0 s\] {re.escape(COUNT)}  \d   \(truth: \d\)\n", done.stdout)
    assert done.stderr == ""


def test_no_frame_is_named_where_what_would_answer_has_left():
    arguments = (
        "--frames",
        96,
        "--policy",
        "sliding-window",
        "--budget",
        160,
        "--append",
        "all",
        "--ask",
        "which shape came first?",
    )
    assert run(*arguments).stdout.endswith("(what would answer this is no longer in memory)\n")
    (answer,) = (line for line in map(json.loads, run(*arguments, "--json").stdout.splitlines()) if line["event"] == "answer")
    assert (answer["evidence"], answer["evidence_held"]) == ([], False)


def test_text_has_statistics_where_they_are_asked_for(monkeypatch):
    shown = run("--realtime", "--seconds", 1.2, "--stats-every", 0.3).stderr.splitlines()
    assert sum(line.startswith("running · ") for line in shown) >= 2
    assert not any(line.startswith("running · ") for line in run("--realtime", "--seconds", 1.2).stderr.splitlines())
