"""``run --state``: processes killed at any moment, refused snapshots, folders that cannot be used, full disks."""

import json
import random
import time

import pytest
from cameras import MjpegCamera
from typed import edgevlm, events, of_kind, refused, start

from edgevlm.calib.demo.world import World
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots.directory import snapshots, verified
from edgevlm.runtime.snapshots.format import Snapshot

COUNT = "how many objects are there now?"
RUN = ["run", "--json", "--threads", "1", "--no-realtime", "--policy", "infinipot-v"]


def run(*arguments):
    return events(*RUN, *arguments)


def newest(folder):
    """The newest snapshot that is good, as a start finds it."""
    return next((found for _, found in verified(folder) if isinstance(found, Snapshot)), None)


def killed_at_random(folder, delays):
    """Runs that go on one from another, each killed so long after its answer; frame -> the tokens answered there."""
    answered = {}
    for delay in delays:
        found = newest(folder)
        asks = ["--ask-at", f"{found.about['session']['time_s']}:{COUNT}"] if found else []
        process = start(*RUN, "--state", folder, "--state-every", "0.05", "--frames", "1000000", *asks)
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "answer" or (found is None and snapshots(folder)):
                    break
            time.sleep(delay)
        finally:
            process.kill()
            said = process.communicate()[1]
        if found:
            assert event["event"] == "answer", said
            frames = found.about["session"]["frames"]
            assert f"resumed from {found.path.name}: {frames:,} frames" in said
            assert event["time_s"] == frames / 2
            answered.setdefault(frames, []).append(event["token_ids"])
    return answered


def uninterrupted(frames):
    """The tokens of the same question at each of these frames, in one session that never stops."""
    model, world, tokens = Model.load("demo", threads=1), World(0), {}
    with Session.open(model) as session:
        for frame in range(1, max(frames) + 1):
            session.watch(world.step())
            if frame in frames:
                answer = session.ask(COUNT)
                answer.wait()
                tokens[frame] = answer.token_ids
    model.close()
    return tokens


@pytest.mark.parametrize("kills", [4, pytest.param(51, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_goes_on_with_the_same_tokens(tmp_path, kills, capsys):
    draw = random.Random(kills)
    answered = killed_at_random(tmp_path, [draw.uniform(0, 0.3) for _ in range(kills)])
    expected = uninterrupted(set(answered))
    resumes = sum(map(len, answered.values()))
    with capsys.disabled():
        print(f"\n{kills} kills, {resumes} resumes at {len(answered)} different frames up to {max(answered)}")
    assert resumes == kills - 1
    for frame, given in answered.items():
        assert given == len(given) * [expected[frame]]


def test_the_stream_goes_on_with_the_demo_where_it_was(tmp_path):
    whole = run("--frames", 43, "--ask", COUNT)
    run("--frames", 21, "--state", tmp_path)
    done = edgevlm(*RUN, "--frames", 22, "--state", tmp_path, "--ask", COUNT, "--ask-at", f"3:{COUNT}")
    assert "resumed from 00000001.snapshot: 21 frames up to 10.5 s" in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (expected,), (answer,) = of_kind(whole, "answer"), of_kind(lines, "answer")  # what was planned for 3 s has been asked
    assert (answer["time_s"], answer["token_ids"]) == (expected["time_s"], expected["token_ids"])
    assert lines[-1]["frames"] == 43
    assert lines[-1]["cache_tokens"] == whole[-1]["cache_tokens"]
    assert 0 < lines[-1]["appended"] < 0.5, "the demo appends what changed"


def test_a_cameras_clock_goes_on_while_nothing_runs(tmp_path):
    off = 1.5
    with MjpegCamera(frames=1000) as camera:
        watched = ["--camera", camera.url, "--fps", 20, "--frames", 3, "--state", tmp_path]
        began = time.monotonic()
        run(*watched)
        took = time.monotonic() - began
        time.sleep(off)
        run(*watched)
    new, old = (found.about for _, found in verified(tmp_path))
    passed = new["session"]["time_s"] - old["session"]["time_s"]
    assert off < passed <= new["written"] - old["written"] + took, "a snapshot is written after its last frame"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--policy", "uniform"], "was written with policy infinipot-v, but this run uses uniform"),
        (["--budget", "512"], ", but this run uses 512"),
        (["--reindexing", "eager"], "was written with reindexing lazy"),
    ],
)
def test_a_snapshot_of_another_session_is_never_written_over(tmp_path, settings, says):
    run("--frames", 5, "--state", tmp_path)
    before = {path.name: path.read_bytes() for path in snapshots(tmp_path)}
    said = refused(*RUN, "--frames", 5, "--state", tmp_path, *settings)
    assert says in said
    assert "choose another folder" in said
    assert {path.name: path.read_bytes() for path in snapshots(tmp_path)} == before


def test_a_folder_in_use_is_refused(tmp_path):
    process = start(*RUN, "--frames", "1000000", "--state", tmp_path, "--state-every", "0.1")
    try:
        process.stdout.readline()
        assert "in use by another process" in refused(*RUN, "--frames", 1, "--state", tmp_path)
    finally:
        process.kill()
        process.communicate()
    run("--frames", 1, "--state", tmp_path)  # a killed one holds nothing


def test_credentials_never_enter_a_snapshot(tmp_path):
    with MjpegCamera(frames=1000) as camera:
        url = camera.url.replace("http://", "http://user:hunter2@") + "?password=hunter3"
        run("--camera", url, "--frames", 3, "--fps", 20, "--state", tmp_path)
    (only,) = snapshots(tmp_path)
    assert b"http://***@" in only.read_bytes()
    assert b"hunter" not in only.read_bytes()
    assert oct(only.stat().st_mode & 0o777) == "0o600"
