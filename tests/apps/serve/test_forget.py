"""``edgevlm forget``: on a running server, and in the folder that it leaves."""

import json
import time

import pytest
from served import Served, eventually, serving
from typer.testing import CliRunner

from edgevlm.apps.forget import MARK
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
        refused("give --yes", "--last", "1h", "--url", server.url)
        refused("say what to forget", "--yes", "--url", server.url)
        status, _, answer = server.request("POST", "/v1/forget", {"all": True})
        assert (status, json.loads(answer)["error"]["param"]) == (400, "confirm")
        refused("there is no stream 'yard'", "--all", "--yes", "--stream", "yard", "--url", server.url)
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
        refused("another process uses it", "--all", "--yes", "--state", folder)
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


def test_links_in_the_state_folder_are_not_followed(tmp_path):
    state, other = tmp_path / "kept", tmp_path / "other"
    for folder in (state, other):
        folder.mkdir()
    for name in ("lock", "00000001.snapshot", "00000001.other", "a.unfinished", "thumbnails.sqlite"):
        (other / name).write_text("mine")
    before = {path.name: path.read_text() for path in other.iterdir()}
    (state / "demo").symlink_to(other)
    with pytest.raises(RuntimeError, match="demo: is a link"):
        Served(tmp_path, "--state", state)
    (state / "yard").symlink_to(other)
    (tmp_path / "edgevlm.toml").write_text(f'state = "{state}"\n[cameras.gate]\nsource = "demo"\n')
    with serving(tmp_path / "one", tmp_path / "edgevlm.toml") as server:
        status, _, body = server.request("POST", "/v1/streams", {"id": "yard", "source": "demo"})
        assert (status, b"is a link" in body) == (400, True)
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
