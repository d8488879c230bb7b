"""Cameras and watches whose names are in any script: their ids, and how they are asked about."""

import json
import unicodedata
from contextlib import closing
from urllib.parse import quote

import pytest

pytest.importorskip("fastapi")
from served import eventually, serving

from edgevlm.apps.forget import forget_folder
from edgevlm.apps.names import id_of
from edgevlm.apps.run.clock import Span
from edgevlm.apps.watches.events import EventStore
from edgevlm.apps.watches.watch import Watch

CONFIG = """
[cameras."Küche 厨房"]
source = "demo"

[[watches]]
name = "Что-то есть"
question = "how many objects are there?"
choices = ["0", "1", "2", "3"]
answer = ["1", "2", "3"]
cameras = ["Küche 厨房"]
"""


def test_ids_stay_and_no_two_names_have_one():
    names = [
        "Front Door",
        "front door",
        "front_door",
        "Küche",
        "Köche",
        "Kuche",
        "厨房",
        "厨房 2",
        "..",
        "a/b",
        "a" * 70,
        "a" * 71,
    ]
    assert len({id_of(name) for name in names}) == len(names)
    assert id_of(unicodedata.normalize("NFD", "Küche")) == id_of("Küche")
    assert all(id_of(id_of(name)) == id_of(name) for name in names)
    assert [id_of(name) for name in ("front-door", "a_b-2", "0")] == ["front-door", "a_b-2", "0"]
    watches = [Watch(question=each).name for each in ("is there a red square?", "门开着吗?", "灯亮着吗?")]
    assert (watches[0], len(set(watches))) == ("is-there-a-red-square", 3)


def test_they_are_shown_by_name_and_found_by_name_or_id(tmp_path):
    (tmp_path / "edgevlm.toml").write_text(CONFIG)
    name, watch = "Küche 厨房", "Что-то есть"
    with serving(tmp_path, tmp_path / "edgevlm.toml") as server:
        (stream,) = server.get("/v1/streams")["data"]
        assert (stream["name"], stream["id"]) == (name, id_of(name))
        assert server.get(f"/v1/streams/{quote(name)}")["id"] == stream["id"]
        (found,) = server.get("/v1/watches")["data"]
        assert (found["name"], found["id"]) == (watch, id_of(watch))
        opened = eventually(lambda: server.get(f"/v1/events?camera={quote(name)}&watch={quote(watch)}")["data"])[-1]
        assert (opened["camera"], opened["watch"]) == (stream["id"], found["id"])
        assert f'watch_open{{stream="{stream["id"]}",watch="{found["id"]}"}}'.encode() in server.request("GET", "/metrics")[2]
        body = {"model": name, "messages": [{"role": "user", "content": "how many objects are there now?"}]}
        assert server.request("POST", "/v1/chat/completions", body)[0] == 200
        status, _, added = server.request("POST", "/v1/streams", {"id": "двор", "source": "demo"})
        assert (status, json.loads(added)["id"], json.loads(added)["name"]) == (201, id_of("двор"), "двор")
        for path in (f"/v1/streams/{quote('двор')}", f"/v1/watches/{quote(watch)}"):
            assert server.request("DELETE", path)[0] == 204
        assert server.request("POST", "/v1/streams", {"id": "a\nb", "source": "demo"})[0] == 400
        assert server.end() == 0
    state = tmp_path / "state" / "edgevlm" / "serve"
    assert forget_folder(str(state), Span(), name)[id_of(name)]["snapshots"]
    with closing(EventStore(state)) as store:
        assert store.query(camera=id_of(name)) == []
