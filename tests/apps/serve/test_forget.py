"""``edgevlm forget``: on a running server, and in the folder that it leaves."""

import json
import shutil
import time
from contextlib import closing, suppress

import numpy as np
import pytest
from served import Served, eventually, serving
from typer.testing import CliRunner

from edgevlm.apps.forget import MARK
from edgevlm.apps.journal import Line
from edgevlm.apps.run.clock import Span
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.cli import app
from edgevlm.errors import UserError

pytest.importorskip("fastapi")


def forget(*arguments):
    return CliRunner().invoke(app, ["forget", *map(str, arguments)], catch_exceptions=False).stdout


def refused(what, *arguments):
    with pytest.raises(UserError, match=what):
        forget(*arguments)


def holds(folder, marks):
    """Which of these bytes stand in any file of a folder."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return [any(mark in file for file in files) for mark in marks]


def pictures(server):
    """The thumbnails of the newest frames, by number."""
    taken = [each["frame"] for each in server.get("/v1/streams/demo/memory")["frames"] if each["thumbnail_url"]]
    return {frame: server.request("GET", f"/v1/streams/demo/thumbnails/{frame}.jpg")[2] for frame in taken}


def test_what_was_seen_is_gone_from_memory_and_disk(tmp_path):
    folder, config = tmp_path / "kept", tmp_path / "edgevlm.toml"
    config.write_text(f'state = "{folder}"\nstate_every = 0.2\nfps = 8\n[cameras.demo]\nsource = "demo"\n')
    with serving(tmp_path / "one", config) as server:
        server.watched("demo", 16)
        server.request("PATCH", "/v1/streams/demo", {"state": "paused"})
        eventually(lambda: server.get("/v1/streams/demo")["state"] == "paused")
        eventually(lambda: len(list((folder / "demo").glob("*.snapshot"))) == 2)
        shown, paused = pictures(server), time.time()
        span = server.get("/v1/streams/demo/memory")["frames"]
        refused("add --yes", "--last", "1h", "--url", server.url)
        refused("choose what to forget", "--yes", "--url", server.url)
        status, _, answer = server.request("POST", "/v1/forget", {"all": True})
        assert (status, json.loads(answer)["error"]["param"]) == (400, "confirm")
        refused("stream 'yard' not found", "--all", "--yes", "--stream", "yard", "--url", server.url)
        middle = next(each["time"] for each in span if each["frame"] >= max(shown) - 8 and each["time"])
        counts = json.loads(forget("--until", middle, "--yes", "--url", server.url, "--json"))
        assert (counts["stream"], counts["rows"] > 0, counts["thumbnails"] > 0) == ("demo", True, True)
        left = server.get("/v1/streams/demo/memory")["frames"]
        assert all(each["time"] is None or each["time"] > middle for each in left)
        kept = {frame for frame in shown if server.request("GET", f"/v1/streams/demo/thumbnails/{frame}.jpg")[0] == 200}
        assert kept
        assert not kept & {each["frame"] for each in span if each["time"] and each["time"] <= middle}
        assert len(list((folder / "demo").glob("*.snapshot"))) == 1
        server.request("PATCH", "/v1/streams/demo", {"state": "running"})
        server.watched("demo", server.get("/v1/streams/demo")["frames_watched"] + 4)
        refused("in use by another process", "--all", "--yes", "--state", folder)
        assert server.request("DELETE", "/v1/streams/demo")[0] == 204  # its memory stays
    assert not any(holds(folder, [picture for frame, picture in shown.items() if frame not in kept]))
    assert all(holds(folder, [shown[frame] for frame in kept]))
    forget("--since", f"{time.time() - paused + 3600:.0f}s", "--yes", "--state", folder)  # and in the folder
    assert not any(holds(folder, shown.values()))
    forget("--all", "--yes", "--state", folder)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"lock", MARK}
    refused("no state of a run or a server", "--all", "--yes", "--state", tmp_path)


def test_a_recording_that_was_forgotten_is_watched_again_only_when_it_is_asked_for(tmp_path):
    pictures, config, state = tmp_path / "pictures", tmp_path / "edgevlm.toml", tmp_path / "kept"
    pictures.mkdir()
    for number in range(20):
        (pictures / f"{number}.ppm").write_bytes(b"P6 64 64 255\n" + bytes([10 * number, 99, 7]) * 4096)
    config.write_text(f'state = "{state}"\nfps = 8\n[cameras.clip]\nsource = "{pictures}"\n')

    def paused(server):
        described = server.get("/v1/streams/clip")
        assert (described["state"], described["frames_watched"]) == ("paused", 0)

    with serving(tmp_path / "one", config) as server:
        server.watched("clip", 4)
        forget("--all", "--yes", "--url", server.url)
        paused(server)
        server.end()
    with serving(tmp_path / "two", config) as server:
        paused(server)
        server.request("PATCH", "/v1/streams/clip", {"state": "running"})
        server.watched("clip", 4)
        server.end()
    forget("--all", "--yes", "--state", state)
    with serving(tmp_path / "three", config) as server:
        paused(server)


WORDS = b"a purple elephant"
BESIDE = (  # that other versions, crashes and damage leave
    "00000009.snapshot", "00000009.other", "x.unfinished", "thumbnails.damaged.sqlite", "thumbnails.damaged.sqlite-wal",
    "store.bin.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """A state folder with all that is kept, in which WORDS and a picture are planted; the picture's thumbnail."""
    folder = tmp_path_factory.mktemp("used")
    state, shown = folder / "state", folder / "shown"
    shown.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for number in range(20):
        (shown / f"{number:02}.ppm").write_bytes(b"P6 64 64 255\n" + noise.tobytes())
    config = ServeConfig(
        state=str(state), state_every=0.2, fps=8, journal={"every": 525_600},
        cameras={"clip": {"source": str(shown)}, "demo": {"source": "demo", "policy": "rekv", "budget": 64}},
    )  # fmt: skip
    with closing(Service(config, print)) as service:
        service.open()
        eventually(lambda: all(each.session.stats.frames > 8 for each in service.streams.values()))
        stream = service.stream("clip")
        jpeg = eventually(lambda: next(filter(None, map(stream.observer.thumbnails.jpeg, range(20))), None))
        now = time.time()
        for camera in service.streams:
            service.journal.add(Line(camera, now, WORDS.decode(), [{"text": WORDS.decode()}]))
            event = WatchEvent(camera, WORDS.decode(), "open", now, 0.9, now, [{"frame": 1}], WORDS.decode())
            service.delivery.record(event, [jpeg])
        eventually(lambda: all(list(state.glob(f"{each}/*.snapshot")) for each in service.streams))
    for camera in ("clip", "demo"):
        for name in BESIDE:
            (state / camera / name).write_bytes(WORDS)
            (state / camera / name).chmod(0o600)
    for name in ("events.damaged.sqlite", "journal.damaged.sqlite", "journal.damaged.sqlite-wal"):
        (state / name).write_bytes(WORDS)
        (state / name).chmod(0o600)
    return state, jpeg


def test_what_a_used_state_folder_holds_is_its_users_alone(used):
    written = [used[0], *used[0].rglob("*")]
    assert {path.name for path in written} >= {"store.bin", "thumbnails.sqlite", "events.sqlite", "journal.sqlite", "lock"}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in written if path.stat().st_mode & 0o077} == {}
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600, 0o700}


@pytest.mark.parametrize("by", ["folder", "server"])
def test_no_place_of_the_state_folder_keeps_what_is_forgotten(tmp_path, used, by):
    state, marks = tmp_path / "kept", [WORDS, *(used[1][at : at + 64] for at in range(700, len(used[1]) - 64, 64))]
    shutil.copytree(used[0], state)
    assert sum(holds(state, marks)) > len(marks) / 2  # others lie across two pages of a database
    if by == "folder":
        forget("--all", "--yes", "--state", state)
    else:
        with closing(Service(ServeConfig(state=str(state), cameras={"demo": {"source": "demo"}}), print)) as service:
            service.open()
            service.forget(None, Span())
    assert not any(holds(state, marks))


def test_a_link_in_place_of_any_file_of_the_state_folder_is_not_followed(tmp_path, used):
    places = sorted(path.relative_to(used[0]) for path in used[0].rglob("*") if path.is_file() and "demo" not in path.parts)
    places += [
        place.with_name(f"{place.name}-{each}") for place in places if place.suffix == ".sqlite" for each in ("wal", "shm")
    ]
    for number, place in enumerate(dict.fromkeys(places)):
        state, mine = tmp_path / f"{number}", tmp_path / f"{number}.mine"
        shutil.copytree(used[0], state)
        mine.write_text("mine")
        (state / place).unlink(missing_ok=True)
        (state / place).symlink_to(mine)
        config = ServeConfig(
            state=str(state), journal={"every": 525_600}, cameras={"clip": {"source": str(used[0].parent / "shown")}}
        )
        with closing(Service(config, print)) as service, suppress(UserError):
            service.open()
            service.forget(None, Span())
        with suppress(UserError):
            forget("--all", "--yes", "--state", state)
        assert mine.read_text() == "mine", place


def test_links_in_the_state_folder_are_not_followed(tmp_path):
    state, other = tmp_path / "kept", tmp_path / "other"
    for folder in (state, other):
        folder.mkdir()
    for name in ("lock", "00000001.snapshot", "00000001.other", "a.unfinished", "thumbnails.sqlite"):
        (other / name).write_text("mine")
    before = {path.name: path.read_text() for path in other.iterdir()}
    (state / "demo").symlink_to(other)
    with pytest.raises(RuntimeError, match="demo: is a symbolic link"):
        Served(tmp_path, "--state", state)
    (state / "yard").symlink_to(other)
    (tmp_path / "edgevlm.toml").write_text(f'state = "{state}"\n[cameras.gate]\nsource = "demo"\n')
    with serving(tmp_path / "one", tmp_path / "edgevlm.toml") as server:
        status, _, body = server.request("POST", "/v1/streams", {"id": "yard", "source": "demo"})
        assert (status, b"is a symbolic link" in body) == (400, True)
        forget("--all", "--yes", "--url", server.url)
    forget("--all", "--yes", "--state", state)
    assert {path.name: path.read_text() for path in other.iterdir()} == before


def test_all_of_a_running_camera_and_of_a_removed_one_goes(tmp_path):
    with serving(tmp_path / "one", "--state", tmp_path / "kept", "--fps", "8") as server:
        for is_removed in (False, True):
            server.request("PATCH", "/v1/streams/demo", {"state": "running"})
            server.watched("demo", 8)
            server.request("PATCH", "/v1/streams/demo", {"state": "paused"})
            shown = pictures(server)
            if is_removed:
                assert server.request("DELETE", "/v1/streams/demo")[0] == 204
                assert all(holds(tmp_path / "kept", shown.values()))
            assert "demo: " in forget("--all", "--yes", "--url", server.url)
            assert not any(holds(tmp_path / "kept", shown.values()))
            if not is_removed:
                described = server.get("/v1/streams/demo")
                assert (described["frames_watched"], described["state"]) == (0, "paused")
