"""A line on stdin is a question: of a recording at its end, of a live source when it comes; and slash commands."""

import json
import subprocess
import sys

import pytest

from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.output import TextOutput
from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.errors import UserError
from edgevlm.runtime.session import Session as RealSession

COUNT = "how many objects are there now?"


def piped(lines, *arguments):
    command = [sys.executable, "-m", "edgevlm", "run", "--threads", "1", "--quiet", *map(str, arguments)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=True)


def test_questions_of_a_recording_are_answered_at_its_end():
    done = piped(f"{COUNT}\n\n/budget\n/nothing\n{COUNT}", "--frames", 20)
    assert done.stdout.count(f"[10.0 s] {COUNT}") == 2
    assert "tokens a layer" in done.stderr
    assert "there is no command /nothing" in done.stderr


def test_piped_questions_replace_those_of_the_demo():
    done = piped(f"{COUNT}\n")
    assert [line.partition("]")[2].split("  ")[0].strip() for line in done.stdout.splitlines()] == [COUNT]


def test_questions_of_a_live_source_are_answered_when_they_come():
    done = piped(f"{COUNT}\n", "--realtime", "--frames", 6, "--json")
    (answer,) = [line for line in map(json.loads, done.stdout.splitlines()) if line["event"] == "answer"]
    assert answer["question"] == COUNT
    assert answer["time_s"] < 3.0, "before its end"


def test_a_policy_that_there_is_not_changes_nothing():
    with RealSession.open("demo", budget=256) as session:
        source = open_source(None, None, SourceOptions())

        def reopen(policy, budget):
            return RealSession.open(session.model, policy=policy or "auto", budget=256)

        run = RunLoop(session, source, TextOutput(quiet=True), RunPlan(), open_session=reopen)
        with pytest.raises(UserError, match="there is no policy"):
            run.reopen("nothing", None)
        assert run.session is session
        run.reopen("uniform", None)
        assert run.session.policy == "uniform"
        run.session.close()
