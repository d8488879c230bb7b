"""The thread that keeps a session: when it writes, what it says, and that questions and frames take turns with it."""

import copy
import errno
import itertools
import os
import subprocess
import threading
import time
from contextlib import suppress

import pytest
from pictures import frames
from stored import until

from edgevlm.apps.doctor import checks
from edgevlm.apps.planning.this_machine import this_machine
from edgevlm.engines.devices.machine import Machine
from edgevlm.errors import UserError
from edgevlm.runtime.budget import Pressure
from edgevlm.runtime.free_memory import Available, available
from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.snapshots.directory import Folder, read_at, snapshots, verified
from edgevlm.runtime.snapshots.format import Snapshot, parts
from edgevlm.runtime.snapshots.writer import CaptureBuffer

TEXT_BUDGET = TextBudget(24, 64, 8)
ASKED = "what color was the square?"


def read(path):
    return read_at(Folder(path.parent), path)


def opened(model, folder, said, every=3600.0):
    budget = 9 * model.bundle.vision.tokens_per_frame
    return Session.open(
        model,
        append="all",
        policy="h2o",
        budget=budget,
        chunk=4,
        text_budget=TEXT_BUDGET,
        state=SnapshotWriter(folder, every, said.append),
    )


def watch(session, images):
    for image in images:
        session.watch(image)


def test_nothing_is_written_where_nothing_has_changed(model, tmp_path):
    said = []
    with opened(model, tmp_path, said, every=0.01) as session:
        time.sleep(0.1)
        assert snapshots(tmp_path) == []
        session.watch(next(frames(1, model)))
        until(lambda: session.stats.snapshots == 1)
        time.sleep(0.1)
        assert session.stats.snapshots == 1
        session.ask(ASKED, "one").wait()
        until(lambda: session.stats.snapshots == 2)
    assert session.stats.snapshots == 2
    assert said == []
    turns = read(snapshots(tmp_path)[0]).about["session"]["conversations"]
    assert [question for question, _ in turns["one"]] == [ASKED]


def test_snapshots_questions_and_frames_take_turns(model, tmp_path):
    """Every snapshot taken amid frames and questions is one of a moment between them: it resumes, and a question fits."""
    said, images = [], list(frames(60, model))
    with opened(model, tmp_path, said, every=0.001) as session:
        asked = [threading.Thread(target=lambda: [session.ask(ASKED).wait() for _ in range(15)]) for _ in range(2)]
        for thread in asked:
            thread.start()
        for image in itertools.chain(images, itertools.cycle(images)):
            session.watch(image)
            if session.stats.frames >= len(images) and session.stats.snapshots > 3:
                break
        for thread in asked:
            thread.join()
    per_frame = model.bundle.vision.tokens_per_frame
    for _, found in verified(tmp_path):
        stream = found.about["stream"]
        assert stream["seq"] == len(found.arrays["layer0.kind"][0]) + stream["stats"]["evicted"] // session.cache.layers
        assert stream["frames"] * per_frame + session._stream.prefix == stream["seq"]
        assert (found.arrays["layer0.kind"] <= 1).all(), "no row of a question"
    assert said == []


def test_what_cannot_be_read_now_is_not_written_over(model, tmp_path, monkeypatch):
    with opened(model, tmp_path, []) as session:
        session.watch(next(frames(1, model)))
    before = snapshots(tmp_path)

    def fails(path):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("edgevlm.runtime.snapshots.directory.open_file", fails)
        with pytest.raises(UserError, match=r"cannot be read now \(.*\); nothing was overwritten"):
            opened(model, tmp_path, [])
    with opened(model, tmp_path, []) as session:
        assert session.stats.frames == 1
    assert snapshots(tmp_path) == before


def test_no_memory_for_a_copy_costs_a_warning(model, tmp_path, monkeypatch):
    said, full, of = [], threading.Event(), CaptureBuffer.copy

    def fails(self, arrays):
        if full.is_set():
            raise MemoryError
        return of(self, arrays)

    monkeypatch.setattr(CaptureBuffer, "copy", fails)
    full.set()
    with opened(model, tmp_path, said, every=0.01) as session:
        session.watch(next(frames(1, model)))
        until(lambda: said)
        time.sleep(0.05)
        assert len(said) == 1
        assert "(out of memory): the stream continues" in said[0]
        full.clear()
        until(lambda: session.stats.snapshots == 1)
    assert len(said) == 2
    assert said[1].startswith("writing snapshots resumed")


MEMORY = 1600


@pytest.mark.parametrize(
    "change",
    [
        lambda about, arrays: about["stream"]["stats"].update(moved=1),
        lambda about, arrays: arrays.pop("layer0.position"),
        lambda about, arrays: arrays.update({name: arrays.pop(f"{name}.score") for name in ["policy.scores.0"]}),
    ],
)
def test_beside_one_that_another_edgevlm_wrote_otherwise_a_stream_begins(model, tmp_path, change):
    with opened(model, tmp_path, []) as session:
        for image in frames(4, model):
            session.watch(image)
    (path,) = snapshots(tmp_path)
    found = read(path)
    about, arrays = copy.deepcopy(dict(found.about)), dict(found.arrays)
    change(about, arrays)
    path.unlink()
    with path.open("wb") as stream:
        stream.writelines(parts({**about, "edgevlm": "0.0.9"}, arrays))
    before, said = path.read_bytes(), []
    with opened(model, tmp_path, said) as session:
        session.watch(next(frames(1, model)))
    assert ["0.0.9" in line for line in said] == [True, False]
    assert path.with_suffix(".other").read_bytes() == before
    with opened(model, tmp_path, []) as session:
        assert session.stats.frames == 1
        session.forget()
    assert [each.suffix for each in tmp_path.iterdir() if each.name != "lock"] == [".snapshot"], "it is forgotten too"


def rewritten(path, change):
    """A snapshot with something else in it and right checksums."""
    found = read(path)
    about, arrays = copy.deepcopy(dict(found.about)), dict(found.arrays)
    change(about, arrays)
    path.unlink()
    with path.open("wb") as stream:
        stream.writelines(parts(about, arrays))


WRONG = [
    lambda about, arrays: about["session"].update(conversations="x"),
    lambda about, arrays: about["stream"].update(positions=[None, *about["stream"]["positions"][1:]]),
    lambda about, arrays: about["stream"].update(seq={}),
    lambda about, arrays: about["stream"]["stats"].update(guidance_ms=None),
    lambda about, arrays: about.update(written=""),
    lambda about, arrays: arrays.update({"layer0.seq": arrays["layer0.seq"].astype(bool)}),
    lambda about, arrays: arrays.update({"layer0.row": arrays["layer0.row"][0]}),
    lambda about, arrays: arrays.update({"chunk.seconds": arrays["chunk.seconds"][:0]}),
]


@pytest.mark.parametrize("change", WRONG)
def test_one_that_does_not_fit_is_refused_and_the_one_before_used(model, tmp_path, change):
    for _ in range(2):
        with opened(model, tmp_path, []) as session:
            for image in frames(3, model):
                session.watch(image)
    newest, older = snapshots(tmp_path)
    rewritten(newest, change)
    said = []
    with opened(model, tmp_path, said) as session:
        assert session.stats.frames == 3
        session.watch(next(iter(frames(1, model))))
    assert [line.partition(" ")[0] for line in said] == ["refused:", "resumed"]
    assert newest.name in said[0]
    assert older.name in said[1]


def test_a_pipe_is_not_waited_for_and_a_new_stream_begins(model, tmp_path):
    with opened(model, tmp_path, []) as session:
        for image in frames(3, model):
            session.watch(image)
    (path,) = snapshots(tmp_path)
    rewritten(path, lambda about, arrays: arrays.pop("layer0.position"))
    os.mkfifo(tmp_path / "00000007.snapshot")
    said = []
    with opened(model, tmp_path, said) as session:
        assert session.stats.frames == 0
    assert "00000007.snapshot cannot be read" in said[0]
    assert "starting a new stream" in said[-1]


def test_short_memory_makes_chunks_smaller_until_there_is_enough(model, monkeypatch):
    images, said, released, appended, free, now = iter(frames(80, model)), [], [], [], 16, 0.0
    budget = 40 * model.bundle.vision.tokens_per_frame
    monkeypatch.setattr(model.engine, "release_memory", released.append)

    def watch(count):
        nonlocal now
        for _ in range(count):
            session.watch(next(images))
            now += 2

    with Session.open(model, append="all", policy="sliding-window", budget=budget, chunk=8, text_budget=TEXT_BUDGET) as session:
        session._pressure = Pressure(8, said.append, lambda: Available(free * MEMORY // 16, MEMORY), lambda: now)
        append = session._stream.append_frames
        session._stream.append_frames = lambda features, *rest: appended.append(len(features)) or append(features, *rest)
        watch(9)
        free = 0.9
        watch(7 + 4 + 2 + 1 + 1)
        assert appended == [8, 8, 4, 2, 1, 1], "a chunk that has begun is finished"
        assert [line[:13] for line in said] == ["memory is low"] * 3
        assert "processing 4 frames at a time instead of 8" in said[0]
        free = 1.5
        watch(2)
        assert appended[-2:] == [1, 1], "between the two thresholds nothing changes"
        free = 2.1
        watch(2 + 4 + 8)
        assert appended[-3:] == [2, 4, 8]
        assert released == [False, False, *[True] * 8, False]
        assert said[3:] == ["enough memory is free again: processing 8 frames at a time"]


def test_a_limit_on_the_group_of_this_process_or_on_one_around_it_counts(tmp_path, monkeypatch):
    """As systemd sets one for a service: the group's own folder has it, and not the root of the tree."""
    own, tree = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text("1:name=systemd:/elsewhere\n0::/system.slice/shop.service\n")
    monkeypatch.setattr("edgevlm.runtime.free_memory.ROOT", tmp_path)
    for group, limit in (("system.slice/shop.service", 1000), ("system.slice", 900)):
        (tree / group).mkdir(parents=True, exist_ok=True)
        for name, text in (("max", str(limit)), ("current", "700"), ("stat", "inactive_file 50\n")):
            (tree / group / f"memory.{name}").write_text(text)
    assert available() == Available(250, 900), "the slice has less than the service in it"
    (tree / "system.slice" / "memory.max").write_text("max")
    assert available() == Available(350, 1000)


@pytest.mark.parametrize("group", ["docker/4f1e", ""])
def test_a_limit_of_version_1_counts_for_sessions_plans_and_doctor(tmp_path, monkeypatch, group):
    """In a container the group's own folder may be the root of the tree that it sees."""
    files = {"limit_in_bytes": 3 << 30, "usage_in_bytes": 2 << 30, "stat": f"cache 9\ntotal_inactive_file {1 << 29}"}
    files = {f"sys/fs/cgroup/memory/{group}/memory.{name}": text for name, text in files.items()}
    files |= {
        "proc/self/cgroup": "9:cpu,cpuacct:/elsewhere\n4:memory:/docker/4f1e",
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr("edgevlm.runtime.free_memory.ROOT", tmp_path)
    assert available() == Available(3 << 29, 3 << 30)
    assert this_machine(Machine(tmp_path), cores=1)["usable_mib"] == 3 << 10
    assert "1.6 of 3.1 GB available" in checks.memory(Machine(tmp_path))[1]


def test_a_memory_left_half_changed_is_never_written(model, tmp_path, monkeypatch):
    """No memory for the second compression: what a layer has evicted is gone, and no snapshot is made of it."""
    said, images = [], list(frames(24, model))
    with opened(model, tmp_path, said) as session:
        watch(session, images[:8])
    session = opened(model, tmp_path, said)
    real = type(session.cache).evict

    def fails(cache, keep):
        real(cache, [keep[0], *[None] * (len(keep) - 1)])
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(type(session.cache), "evict", fails)
    with pytest.raises(MemoryError):
        watch(session, images[8:])
    monkeypatch.undo()
    for use in (lambda: session.watch(images[0]), lambda: session.ask(ASKED).wait(), session.flush):
        with pytest.raises(UserError, match="inconsistent; open the session again"):
            use()
    session.close()
    assert "cannot write a snapshot" in said[-1]
    assert "inconsistent" in said[-1]
    with opened(model, tmp_path, said) as again:
        assert again.stats.frames == 8
        assert str(again.ask(ASKED))


@pytest.fixture
def disk(tmp_path):
    """Of 2 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def fill(disk):
    path = disk / "stuff"
    with path.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))
    return path


def test_it_costs_one_warning_and_no_frame_and_ends_when_there_is_room(model, disk):
    said, images = [], itertools.cycle(list(frames(60, model)))
    writer = SnapshotWriter(disk / "state", every=0.02, notify=said.append)
    with Session.open(model, append="all", budget=9 * model.bundle.vision.tokens_per_frame, chunk=4, state=writer) as session:

        def until(done):
            deadline = time.monotonic() + 120
            while not done():
                assert time.monotonic() < deadline
                session.watch(next(images))
                time.sleep(0.03)

        until(lambda: len(snapshots(disk / "state")) == 2)
        stuff = fill(disk)
        until(lambda: said)
        good, seen = snapshots(disk / "state"), session.stats.frames
        for _ in range(8):
            session.watch(next(images))
            time.sleep(0.03)
        assert session.stats.frames == seen + 8
        assert snapshots(disk / "state") == good, "the good ones stay"
        assert len(said) == 1
        assert "(the disk is full): the stream continues" in said[0]
        stuff.unlink()
        until(lambda: len(said) == 2)
        assert said[1].startswith("writing snapshots resumed")
        until(lambda: snapshots(disk / "state")[0] not in good)
    assert all(isinstance(found, Snapshot) for _, found in verified(disk / "state"))
    assert sorted(path.suffix for path in (disk / "state").iterdir()) == ["", ".snapshot", ".snapshot"]
    with Session.open(
        model, append="all", budget=9 * model.bundle.vision.tokens_per_frame, chunk=4, state=disk / "state"
    ) as resumed:
        assert resumed.stats.frames == session.stats.frames
