"""``edgevlm watch`` as a process: events on stdout, interrupted, killed, and wrong options."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from typed import edgevlm

pytest.importorskip("pydantic")
from edgevlm.apps.sources.demo import DemoSource
from edgevlm.apps.watches.events import EventStore

COMMAND = [sys.executable, "-m", "edgevlm", "watch"]
SEED = 12  # of a world that is empty now and then
SHOWN = ["how many objects are there?", *(part for count in "0123" for part in ("--choice", count)), "--seed", SEED, "--json",
         *(part for count in "123" for part in ("--answer", count))]  # fmt: skip


@pytest.fixture
def watching():
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def shown(event):
    """How many objects the world shows in the frame that was asked about, and in the two after it."""
    source, first = DemoSource(2.0, SEED), round(2 * event["evidence"][0]["time_s"])
    truths = [source.read().scene.truth("how many objects are there now?") for _ in range(first + 2)]
    return truths[first - 1 :]


def test_a_watch_stays_open_across_a_kill_and_opens_once(watching, tmp_path):
    first = watching(*SHOWN, "--state", tmp_path)
    opened = json.loads(first.stdout.readline())
    assert (opened["event"], opened["state"], opened["camera"]) == ("watch", "open", "demo")
    assert set(opened) == {"event", "schema", "id", "watch", "camera", "state", "time", "probability", "evidence"}
    assert set(shown(opened)) & set("123")
    assert opened["probability"] > 0.6
    first.kill()
    first.wait()
    second = watching(*SHOWN, "--state", tmp_path)
    while (event := json.loads(second.stdout.readline()))["id"] == opened["id"]:
        pass  # sent again, where the kill came before it was noted as sent
    assert event["state"] == "close"
    assert "0" in shown(event)
    second.send_signal(signal.SIGINT)
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 0
    assert "Traceback" not in errors


def test_the_opening_of_a_watch_that_was_removed_has_ended(watching, tmp_path):
    """It was open when its program was killed; the next one asks something else, and then it again."""
    first = watching(*SHOWN, "--state", tmp_path)
    opened = json.loads(first.stdout.readline())
    first.kill()
    first.wait()
    second = watching("is there a red square?", "--json", "--state", tmp_path, "--seed", 10)
    while json.loads(second.stdout.readline())["watch"] != "is-there-a-red-square":
        pass
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=120)
    with closing(EventStore(tmp_path)) as store:
        last = store.last("demo", opened["watch"])
        assert (last.state, last.id != opened["id"]) == ("close", True)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["is it raining?"], "question: The demo model was never taught this question. Nearest: is there"),
        (["is there a red square?", "--open-above", "0.3"], "--close-below: 0.4 is above open_above (0.3); change one of them"),
        (["is there a red square?", "--camera", "nowhere.mp4"], "nowhere.mp4"),
    ],
)
def test_wrong_options_are_one_line(arguments, line, monkeypatch):
    monkeypatch.setattr("edgevlm.apps.serve.watch.is_gone", lambda _: pytest.fail("it is watched"))
    done = edgevlm("watch", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"edgevlm: {line}") or line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
