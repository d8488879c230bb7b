"""A line on stdin is a question: of a recording at its end, of a live source when it comes; and slash commands."""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.output import TextOutput
from edgevlm.apps.sources import Frame, Source, SourceOptions, open_source
from edgevlm.apps.terminal.commands import Commands
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


class Numbered:
    def __init__(self, number):
        self.number = number

    def truth(self, question):
        return str(self.number)


class Three(Source):
    name = "three"

    def __init__(self):
        self.frames = iter(Frame(np.zeros((2, 2, 3), np.uint8), float(i), Numbered(i)) for i in range(1, 4))

    def read(self):
        return next(self.frames, None)


class Session:
    """Answers a question asked while frame 2 is taken in, as a session does: after that frame, from it."""

    def __init__(self, is_demo):
        self.model, self.time_s = SimpleNamespace(is_demo=is_demo), 0.0
        self.stats = SimpleNamespace(
            frames=3,
            encoded=1.0,
            tokens=0,
            cache_bytes=0,
            memory=SimpleNamespace(appended=1.0, compressions=0, compress_ms=0.0),
            store=None,
        )
        self.policy = "uniform"
        self.inside, self.asked, self.conversations = threading.Event(), threading.Event(), []

    def watch(self, image, time_s):
        if time_s == 2.0:
            self.inside.set()
            assert self.asked.wait(120)
        self.time_s = time_s

    def ask(self, question, *, conversation):
        self.conversations.append(conversation)
        self.asked.set()
        return Said()

    def check(self, question): ...
    def flush(self): ...
    def close(self): ...


class Said:
    time_s, text, token_ids, ttft_ms, tpot_ms, evidence = 2.0, "2", [1], 1.0, 0.0, None

    def __iter__(self):
        return iter(["2"])


class Output:
    def __init__(self):
        self.answers = []

    def answer(self, answered):
        self.answers.append(answered)

    def piece(self, text): ...
    def stats(self, stats): ...
    def summary(self, stats): ...
    def notice(self, text): ...


@pytest.mark.parametrize(("is_demo", "conversation"), [(True, None), (False, "terminal")])
def test_the_truth_is_that_of_the_frame_answered_from(is_demo, conversation):
    """And the demo model, which was taught no conversations, is asked without earlier turns."""
    session, output = Session(is_demo), Output()
    run = RunLoop(session, Three(), output, RunPlan())

    def ask_meanwhile():
        session.inside.wait(120)
        assert run.frame.time_s == 1.0, "frame 2 is being taken in"
        Commands(run, print)(COUNT)

    asker = threading.Thread(target=ask_meanwhile)
    asker.start()
    run()
    asker.join(120)
    assert [(answered.time_s, answered.truth) for answered in output.answers] == [(2.0, "2")]
    assert session.conversations == [conversation]


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
