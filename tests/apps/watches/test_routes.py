"""Watches of a server: from edgevlm.toml and by its routes, with their states as events."""

import json
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from served import WAIT_S, eventually, serving

CONFIG = """
[cameras.demo]
source = "demo"

[[watches]]
name = "count"
question = "how many objects are there?"
choices = ["0", "1", "2", "3"]
answer = ["1", "2", "3"]
cameras = ["demo"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "edgevlm.toml").write_text(CONFIG)
    with serving(folder, folder / "edgevlm.toml") as served:
        yield served


def refused(server, body, method="POST", path="/v1/watches"):
    """The field that a 400 names."""
    status, _, answer = server.request(method, path, body)
    assert status == 400, answer
    return json.loads(answer)["error"]["param"]


def test_a_watch_of_the_configuration_is_asked_and_its_events_are_kept(server):
    def stands(**wanted):
        one = server.get("/v1/watches/count")
        return wanted.items() <= one["cameras"][0].items() and one

    watch = eventually(lambda: stands(state="open", answer="yes"))
    assert (watch["question"], watch["answer"]) == ("how many objects are there?", ["1", "2", "3"])
    events = server.get("/v1/events?watch=count")["data"]
    assert events[-1]["state"] == "open"
    is_open = b'edgevlm_watch_open{stream="demo",watch="count"} 1.0'
    eventually(lambda: is_open in server.request("GET", "/metrics")[2])
    assert b'edgevlm_watch_probability{stream="demo",watch="count"}' in server.request("GET", "/metrics")[2]
    status, headers, jpeg = server.request("GET", events[-1]["evidence"][0]["jpeg_url"])
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    assert jpeg.startswith(b"\xff\xd8")


def test_watches_are_added_paused_and_removed_and_listeners_are_told(server):
    told = []

    def listen():
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("GET", "/v1/streams/demo/events")
        response, kind = connection.getresponse(), ""
        while not (told and told[-1]["paused"]):
            line = response.readline().decode().strip()
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if kind == "watch" and line.startswith("data: ") and json.loads(line[6:])["watch"] == "red":
                told.append(json.loads(line[6:]))
        connection.close()

    thread = threading.Thread(target=listen)
    thread.start()
    status, _, body = server.request("POST", "/v1/watches", {"name": "red", "question": "is there a red square?"})
    assert (status, json.loads(body)["id"]) == (201, "red")
    eventually(lambda: told and told[-1]["answer"] == "no")
    assert [each["id"] for each in server.get("/v1/watches")["data"]] == ["count", "red"]
    assert server.request("PATCH", "/v1/watches/red", {"state": "paused"})[0] == 200
    thread.join(WAIT_S)
    assert told[-1] | {"time": ""} == {
        "time": "", "watch": "red", "camera": "demo", "state": "closed", "answer": None, "probability": None, "opened": None,
        "paused": True,
    }  # fmt: skip
    assert server.request("DELETE", "/v1/watches/red")[0] == 204
    assert server.request("GET", "/v1/watches/red")[0] == 404


def test_what_is_wrong_with_a_watch_is_named(server):
    asked = {"question": "is there a red square?"}
    assert refused(server, {}) == "question"
    assert refused(server, {"question": "is it raining?"}) == "question"
    assert refused(server, asked | {"name": "count"}) == "name"
    assert refused(server, asked | {"cameras": ["garage"]}) == "cameras"
    assert refused(server, asked | {"colour": "red"}) == "colour"
    assert refused(server, {"state": "closed"}, "PATCH", "/v1/watches/count") == "state"
    assert server.request("DELETE", "/v1/watches/nothing")[0] == 404
