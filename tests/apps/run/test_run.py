"""What a run answers and prints: of cameras, of windows of time, and of what has left the memory."""

import errno
import fcntl
import json
import os
import threading
import time
from contextlib import closing
from datetime import datetime
from itertools import chain, repeat
from unittest.mock import Mock

import av
import psutil
import pytest
from cameras import MjpegCamera
from PIL import Image
from typed import edgevlm, events, of_kind, refused

from edgevlm.apps.journal import Journal, Line
from edgevlm.apps.run.clock import moment
from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.output import TextOutput
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.service import Service
from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.errors import UserError
from edgevlm.runtime.model import Model, demo_bundle
from edgevlm.runtime.session import Session

NOW = datetime(2026, 11, 22, 14, 3, 22).timestamp()
COUNT = "how many objects are there now?"
RUN = ("run", "--threads", "1")


def test_a_camera_is_watched_from_when_the_model_is_there(monkeypatch):
    load = Model.load
    monkeypatch.setattr("edgevlm.apps.launch.Model.load", lambda *given, **named: (time.sleep(1.5), load(*given, **named))[1])
    with MjpegCamera(frames=1000) as camera:
        *found, summary = events(*RUN, "--json", "--camera", camera.url, "--fps", 20, "--seconds", 1, "--ask", COUNT)
    assert summary["frames"] > 0
    assert summary["source_state"] == "ended"
    (answer,) = of_kind(found, "answer")
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
    for planned in (["--ask-at", "2:" + 4000 * "red ", "--ask", COUNT], ["--ask", "<image> " + COUNT], ["--ask", "caf\udce9"]):
        refused("run", "--frames", "8", *planned)
    assert watched == []


def test_no_frame_is_named_where_what_would_answer_has_left():
    window = ("--policy", "sliding-window", "--budget", 160, "--append", "all")
    arguments = (*RUN, "--frames", 96, *window, "--ask", "which shape came first?")
    assert edgevlm(*arguments).stdout.endswith("(the frames with the answer are no longer in memory)\n")
    (answer,) = of_kind(events(*arguments, "--json"), "answer")
    assert (answer["evidence"], answer["evidence_held"]) == ([], False)


def test_the_demo_model_marks_answers_about_other_pictures_as_guesses(tmp_path):
    for number in range(4):
        Image.new("RGB", (64, 64), (number * 60, 0, 0)).save(tmp_path / f"{number}.png")
    arguments = ("run", "--video", tmp_path, "--ask", COUNT, "--ask", "is it raining?")
    guessed, untaught = of_kind(events(*arguments, "--json"), "answer")
    assert (guessed["model_fits_source"], guessed["evidence"]) == (False, [])
    assert untaught["text"].count("?") == 3, "the nearest three that it was taught"
    assert "(a guess: the demo model knows only its own world" in edgevlm(*arguments).stdout
    (fits,) = of_kind(events(*RUN, "--frames", 8, "--ask", COUNT, "--json"), "answer")
    assert fits["model_fits_source"]


def test_moments_are_durations_ago_or_by_the_clock():
    assert [NOW - moment(text, NOW) for text in ("90s", "10m", "1h30m", "1.5h", "2d")] == [90, 600, 5400, 5400, 172_800]
    assert moment("14:03", NOW) == NOW - 22
    assert moment("14:03:23", NOW) == NOW - 86_399  # yesterday's
    assert moment("2026-11-22T14:03:00", NOW) == moment("2026-11-22 14:03", NOW) == NOW - 22
    assert moment("1970-01-02T00:00:00Z", NOW) == 86_400
    for wrong in ("", "10", "m", "-5m", "25:00", "14:60", "yesterday", "9e9d", "99999999999d", "10m 5", "٣m"):
        with pytest.raises(UserError, match="is not a time; give 10m, 1h30m, 14:03 or 2026-11-22T14:03"):
            print(moment(wrong, NOW))


@pytest.fixture
def berlin(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield lambda text: datetime.fromisoformat(text).timestamp()
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("now", "evening"), [("2026-03-29T09:00+02:00", "2026-03-28T20:30+01:00"),
                                              ("2026-10-25T09:00+01:00", "2026-10-24T20:30+02:00")])  # fmt: skip
def test_the_evening_before_daylight_saving_changes_is_forgotten(tmp_path, monkeypatch, berlin, now, evening):
    monkeypatch.setattr("edgevlm.apps.run.clock.time.time", lambda: berlin(now))
    with closing(Journal(tmp_path)) as journal:
        for hours in (-1, 0, 1):
            journal.add(Line("door", berlin(evening) + 3600 * hours, f"{hours} h"))
    edgevlm("forget", "--since", "20:00", "--until", "21:00", "--state", tmp_path, "--yes")
    with closing(Journal(tmp_path)) as journal:
        assert [line.text for line in journal.query()] == ["1 h", "-1 h"]


@pytest.mark.parametrize(("text", "now", "found"), [
    ("02:30", "2026-03-29T09:00+02:00", "does not exist"), ("2026-10-25 02:30", "2026-11-01T09:00+01:00", "occurred twice"),
    ("02:30", "2026-10-25T09:00+01:00", "occurred twice"), ("02:30", "2026-10-25T02:45+02:00", "2026-10-25T02:30+02:00"),
    ("02:30", "2026-03-29T01:00+01:00", "2026-03-28T02:30+01:00"),
])  # fmt: skip
def test_a_time_that_a_day_has_not_or_twice_is_refused(berlin, text, now, found):
    if found.startswith("2"):
        assert moment(text, berlin(now)) == berlin(found)
    else:
        with pytest.raises(UserError, match=found):
            moment(text, berlin(now))


def test_a_name_that_is_not_utf8_is_watched_or_refused(tmp_path):
    name = os.fsdecode(b"cl\xefp")
    video, bundle = tmp_path / f"{name}.mp4", tmp_path / name
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", 10, width=64, height=64)
        for frame in [*(av.VideoFrame(64, 64) for _ in range(8)), None]:
            container.mux(stream.encode(frame))
    (tmp_path / "clip.mp4").rename(video)
    bundle.symlink_to(demo_bundle())
    for option in ("--video", "--camera"):
        assert events(*RUN, "--json", option, video, "--fps", 10)[-1]["frames"] == 8
    config = ServeConfig(cameras={"door": {"source": str(video)}}, state=str(tmp_path / f"{name} state"))
    with closing(Service(config, print)) as service:
        service.open()
        assert json.dumps(service.stream("door").describe(), ensure_ascii=False).encode()
    for arguments in (("run", "--model", bundle), ("plan", bundle), ("export", bundle), ("run", "--policy", f"{name}.py:Mine")):
        assert "not UTF-8" in refused(*arguments)


def test_a_statistic_that_cannot_be_read_ends_no_run(monkeypatch):
    full = OSError(errno.EMFILE, "Too many open files")
    looks = Mock(side_effect=chain([psutil.virtual_memory()], repeat(full)))  # the first is of what opens the session
    monkeypatch.setattr("psutil.virtual_memory", looks)
    monkeypatch.setattr("psutil.Process.memory_info", Mock(side_effect=full))
    assert events(*RUN, "--frames", 8, "--json")[-1]["frames"] == 8
    assert looks.call_count > 1


def test_a_run_answers_about_a_window():
    """Evidence of any answer lies in it, and an empty one says so in one line."""
    windows = ("/since 3s", "/since 9s until 6s", "/since 1h until 30m")
    done = edgevlm(*RUN, "--frames", 24, *(f"--ask={window} {COUNT}" for window in windows), "--json")
    answers = of_kind(map(json.loads, done.stdout.splitlines()), "answer")
    for answer, since, until in zip(answers, (9, 3), (12, 6), strict=True):
        assert "truth" not in answer
        assert answer["evidence"]
        for seen in answer["evidence"]:
            assert since <= seen["time_s"] <= seen["until_s"] <= until
            assert seen["time"] is None
    (empty,) = (line for line in done.stderr.splitlines() if "holds nothing" in line)
    assert empty.endswith("of the stream; it reaches back to 0.5 s")


def folder_of_pictures(path, count):
    path.mkdir()
    for number in range(count):
        Image.new("RGB", (32, 32), (40 * number, 90, 90)).save(path / f"{number}.png")
    return path


def test_another_sources_memory_is_resumed_only_where_that_is_asked_for(tmp_path):
    front, yard = folder_of_pictures(tmp_path / "front", 4), folder_of_pictures(tmp_path / "yard", 6)
    state = ("--append", "all", "--state", tmp_path / "state")
    assert events(*RUN, "--json", "--video", front, *state)[-1]["frames"] == 4
    told = refused(*RUN, "--video", yard, *state)
    assert "holds the memory of front, not of yard" in told
    assert "--state-from 'front'" in told
    assert "holds the memory of front" in refused(*RUN, "--video", yard, *state, "--state-from", "cellar")
    assert events(*RUN, "--json", "--video", yard, *state, "--state-from", "front")[-1]["frames"] == 10, "from its beginning"
    assert events(*RUN, "--json", "--video", yard, *state)[-1]["frames"] == 10


def test_a_state_on_a_disk_without_locks_works_and_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    front = folder_of_pictures(tmp_path / "front", 4)
    for _ in range(2):
        done = edgevlm(*RUN, "--json", "--video", front, "--state", tmp_path / "state")
        assert done.returncode == 0
        assert "its disk does not support locks (a network disk?); let no other program use it" in done.stderr
    assert "resumed from" in done.stderr
