"""A state folder on a file system that is really full."""

import itertools
import subprocess
import time
from contextlib import suppress

import pytest
from pictures import frames

from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.snapshots.directory import verified
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.snapshots.storage import snapshots


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
    with Session.open(model, budget=9 * model.bundle.vision.tokens_per_frame, chunk=4, state=writer) as session:

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
        assert "(the disk is full): the stream goes on" in said[0]
        stuff.unlink()
        until(lambda: len(said) == 2)
        assert said[1].startswith("snapshots are written again")
        until(lambda: snapshots(disk / "state")[0] not in good)
    assert all(isinstance(found, Snapshot) for _, found in verified(disk / "state"))
    assert sorted(path.suffix for path in (disk / "state").iterdir()) == ["", ".snapshot", ".snapshot"]
    with Session.open(model, budget=9 * model.bundle.vision.tokens_per_frame, chunk=4, state=disk / "state") as resumed:
        assert resumed.stats.frames == session.stats.frames
