"""The file of events: what it holds, and what it does on bad disks."""

import errno
import fcntl
import os
import subprocess
from contextlib import closing, suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.errors import UserError
from edgevlm.runtime.instant import Instant

FILE, DAMAGED = EventStore.FILE, "events.damaged.sqlite"
NOW = 1_795_000_000.0
EVENT = WatchEvent("door", "parcel", "open", NOW, 0.97, NOW, ({"frame": 3, "time_s": 1.5},), "is there a parcel?")
JPEG = b"\xff\xd8 a picture" * 100


def numbered(count, **changes):
    return [replace(EVENT, time=NOW + number, opened=NOW + number, **changes) for number in range(count)]


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    store = EventStore(tmp_path, said.append, days=1e5)
    yield store
    store.close()


def test_ids_depend_on_camera_watch_opening_and_state_alone():
    assert EVENT.id == replace(EVENT, probability=0.1, time=NOW + 9, question="").id == "e757adf6148a673e5d6025ab84c0c8cc"
    others = [replace(EVENT, camera="x"), replace(EVENT, watch="x"), replace(EVENT, state="close"), replace(EVENT, opened=0.0)]
    assert len({EVENT.id, *(each.id for each in others)}) == 5


def test_it_is_found_by_time_camera_watch_and_text(store):
    for event in [*numbered(3), replace(EVENT, camera="yard", question="is there a dog?")]:
        store.record(event)
    assert [event.time - NOW for event in store.query()] == [2, 1, 0, 0]
    assert len(store.query(since=NOW + 1)) == 2
    assert len(store.query(until=NOW)) == 2
    assert len(store.query(since=NOW + 1, until=NOW + 1)) == 1
    assert [event.camera for event in store.query(text="A DOG")] == ["yard"]
    assert not store.query(text="%")
    assert len(store.query(camera="door", watch="parcel", limit=2)) == 2


def test_what_is_to_be_sent_outlives_the_process_in_its_order(tmp_path, store):
    for event in reversed(numbered(3)):  # a clock that runs backwards
        store.record(event, [JPEG], ["phone", "log"])
    store.sent("log", store.next("log")[0].id)
    store.close()
    again = EventStore(tmp_path)
    assert again.waiting() == {"phone": 3, "log": 2}
    event, pictures = again.next("log")
    assert (event.time, pictures) == (NOW + 1, [JPEG])
    again.drop("phone")
    assert again.waiting() == {"log": 2}
    again.close()


@pytest.fixture
def clock(monkeypatch):
    """A machine's clock: ``clock.run(days, set_by=days)`` lets time pass, and sets the wall clock."""
    now = SimpleNamespace(boot="this", boot_s=1000.0, wall=NOW)

    def run(days, set_by=0.0, boot=None):
        now.boot_s, now.wall, now.boot = now.boot_s + 86_400 * days, now.wall + 86_400 * (days + set_by), boot or now.boot

    monkeypatch.setattr(Instant, "now", lambda: Instant(now.boot, now.boot_s, now.wall))
    return SimpleNamespace(now=now, run=run)


def put(store, clock, *names, sinks=()):
    for name in names:
        store.record(replace(EVENT, watch=name, time=clock.now.wall, opened=clock.now.wall), sinks=sinks)


def names(store):
    return {event.watch for event in store.query(limit=1000)}


def test_old_events_go_but_not_those_still_to_be_sent(tmp_path, clock):
    store = EventStore(tmp_path, days=1)
    put(store, clock, "unsent", sinks=["phone"])
    put(store, clock, "old")
    clock.run(0.9)
    put(store, clock, "new")
    assert names(store) == {"unsent", "old", "new"}, "a day's rows go at once"
    clock.run(1.2)
    put(store, clock, "newest")
    assert names(store) == {"unsent", "newest"}
    store.close()


@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("boot", [None, "next"], ids=["same boot", "next boot"])
@pytest.mark.parametrize("days", [40, -40])
def test_a_clock_that_is_set_deletes_nothing(tmp_path, clock, days, boot, again):
    store = EventStore(tmp_path, days=30)

    def go_on(*given):
        nonlocal store
        clock.run(*given)
        if again:
            store.close()
            store = EventStore(tmp_path, days=30)

    put(store, clock, "before")
    go_on(0.001, days, boot)
    put(store, clock, "wrong")
    go_on(0.001, -days, boot and "third")
    put(store, clock, "after")
    assert names(store) == {"before", "wrong", "after"}
    for _ in range(33):
        clock.run(1)
        put(store, clock, "later")
    assert names(store) == {"later"}, "all have grown old, whatever the clock was"
    store.close()


def test_above_its_cap_pictures_go_first(tmp_path):
    store = EventStore(tmp_path, days=1e5, cap=1 << 18)
    for event in numbered(40):
        store.record(event, [os.urandom(20_000)], ["phone"])
    assert len(store.query(limit=1000)) == store.waiting()["phone"] == 40
    held = [event for event in store.query(limit=1000) if store.picture(event.id, 0)]
    assert 5 < len(held) < 15
    assert held[0].time == NOW + 39
    assert (tmp_path / FILE).stat().st_size < 1.5 * (1 << 18)
    store.close()


def test_what_is_forgotten_leaves_no_byte_on_the_disk(tmp_path, store):
    for event in numbered(4):
        store.record(event, [JPEG + b"%d" % event.time], ["phone"])
    assert store.delete(since=NOW + 1, until=NOW + 2) == 2
    assert [event.time - NOW for event in store.query()] == [3, 0]
    bytes_left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert [bytes_left.count(b"%d" % event.time) for event in numbered(4)] == [1, 0, 0, 1]
    assert store.waiting() == {"phone": 2}


def spoilt(path, size):
    with path.open("r+b") as file:
        file.seek(size)
        file.write(b"spoilt" * 4000)


@pytest.mark.parametrize("start", [0, 5000])
def test_a_damaged_file_is_set_aside_with_one_line(tmp_path, said, start):
    store = EventStore(tmp_path)
    for event in numbered(50):
        store.record(event, [JPEG])
    store.close()
    spoilt(tmp_path / FILE, start)
    store = EventStore(tmp_path, said.append)
    assert len(said) == 1
    assert "is damaged" in said[0]
    assert (tmp_path / DAMAGED).is_file()
    store.record(EVENT, sinks=["phone"])
    assert store.next("phone")[0].id == EVENT.id
    store.close()
    EventStore(tmp_path, said.append).close()
    assert len(said) == 1


def test_a_newer_file_and_a_folder_that_is_none_are_refused(tmp_path, store):
    store._run("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(UserError, match="newer edgevlm"):
        EventStore(tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        EventStore(tmp_path / FILE / "state")


@pytest.fixture
def disk(tmp_path):
    """Of 1 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_loses_nothing_and_a_read_only_one_is_refused(disk, said):
    store, events = EventStore(disk, said.append, days=1e5), numbered(6)
    store.record(events[0], [JPEG], ["phone"])
    with (disk / "stuff").open("wb", buffering=0) as stuff, suppress(OSError):
        while True:
            stuff.write(bytes(512))
    for event in events[1:4]:
        store.record(event, [JPEG * 10], ["phone"])
    assert len(said) == 1
    assert "full" in said[0]
    got = []
    for _ in range(2):
        event, pictures = store.next("phone")
        got.append(event.time - NOW)
        assert pictures
        store.sent("phone", event.id)
    (disk / "stuff").unlink()
    store.record(events[4], sinks=["phone"])
    assert said[1:] == ["writing events resumed"]
    store.close()
    store = EventStore(disk, days=1e5)
    while found := store.next("phone"):
        got.append(found[0].time - NOW)
        store.sent("phone", found[0].id)
    assert got == [0, 1, 2, 3, 4]
    assert len(store.query()) == 5
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(UserError, match="cannot be written"):
        EventStore(disk)


def test_on_a_disk_without_locks_it_works_without(tmp_path, monkeypatch, said):
    """As NFS without its lock service; the file was written on a disk of this machine before."""
    with closing(EventStore(tmp_path, said.append)) as local:
        local.record(EVENT)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    for number in (1, 2):
        with closing(EventStore(tmp_path, said.append)) as store:
            store.record(replace(EVENT, opened=NOW + number))
            assert len(store.query()) == number + 1
            assert not list(tmp_path.glob("*-shm")), "no memory is shared through the disk"
    assert said == []
