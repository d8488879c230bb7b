"""Sources that do not wait, through the command: what is loaded first costs no frame, and what is dropped is said."""

import json
import threading
import time

import pytest
from cameras import MjpegCamera
from typer.testing import CliRunner

from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.output import TextOutput
from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

COUNT = "how many objects are there now?"
LOADING = 1.5  # seconds


@pytest.fixture
def slow_load(monkeypatch):
    load = Model.load

    def slowly(*arguments, **settings):
        time.sleep(LOADING)
        return load(*arguments, **settings)

    monkeypatch.setattr("edgevlm.apps.launch.Model.load", slowly)


def run(*arguments):
    done = CliRunner().invoke(app, ["run", "--json", "--threads", "1", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def of_kind(lines, event):
    return [line for line in lines if line["event"] == event]


def test_a_camera_is_watched_from_when_the_model_is_there(slow_load):
    with MjpegCamera(frames=1000) as camera:
        lines, _ = run("--camera", camera.url, "--fps", 20, "--seconds", 1, "--ask", COUNT)
    assert lines[-1]["frames"] > 0
    assert lines[-1]["source_state"] == "ended"
    (answer,) = of_kind(lines, "answer")
    assert 0 < answer["time_s"] <= 1


def test_a_question_typed_before_the_first_frame_waits_for_it(capsys):
    with Session.open("demo", budget=256) as session:
        run = RunLoop(session, open_source("demo", None, SourceOptions(realtime=True)), TextOutput(), RunPlan(frames=4))
        typed = threading.Thread(target=run.ask_typed, args=(COUNT,))
        typed.start()
        run()
        typed.join()
    printed = capsys.readouterr()
    assert COUNT in printed.out
    assert "no frame has been watched" not in printed.err


def test_a_question_that_does_not_fit_is_refused_before_anything_is_watched(monkeypatch):
    watched = []
    monkeypatch.setattr("edgevlm.apps.launch.Session.watch", lambda *_: watched.append(1))
    monkeypatch.setattr("edgevlm.apps.run.loop.RunLoop.as_taught", lambda _, text: text)
    for planned in (["--ask-at", "2:" + 160 * "red ", "--ask", COUNT], ["--ask", "<image> " + COUNT], ["--ask", "caf\udce9"]):
        done = CliRunner().invoke(app, ["run", "--frames", "8", *planned])
        assert isinstance(done.exception, UserError), done.output
        assert "\n" not in str(done.exception)
    assert watched == []
