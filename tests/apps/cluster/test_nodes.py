"""Nodes share cameras and move them, pauses, switches and watches included."""

import threading
from unittest.mock import Mock

import httpx
import pytest
from jsonschema import Draft202012Validator
from nodes import cluster, frames, lose, patch
from served import NOW, WAIT_S, eventually

from edgevlm import __version__
from edgevlm.apps.cluster.agent import NOTHING, NodeAgent
from edgevlm.apps.cluster.director import GRACE_S, LEASE_S
from edgevlm.apps.cluster.head import Head
from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.errors import UserError

__all__ = ["cluster"]


def test_any_node_answers_for_all_cameras(cluster):
    a, b = cluster.start("a", ["one", "two"]), cluster.start("b")
    weights, camera, _ = a.agent.plan("demo")
    a.agent._memory = b.agent._memory = weights + int(1.5 * camera)
    assert len(cluster.settle("a")) == 1
    where = cluster.settle()
    assert sorted(where.values()) == ["a", "b"]  # one fits on the first node, one on the node that came
    there = next(camera for camera, name in where.items() if name == "b")
    eventually(lambda: frames(b, there) > 4)
    listed = a.get("/v1/streams").json()["data"]
    assert {each["id"]: each["node"] for each in listed} == where
    assert a.get(f"/v1/streams/{there}").json()["node"] == "b"
    assert a.get(f"/v1/streams/{there}/frame.jpg").content[:2] == b"\xff\xd8"
    with httpx.stream("GET", f"{a.url}/v1/streams/{there}/mjpeg", timeout=WAIT_S) as answer:
        assert b"Content-Type: image/jpeg" in next(answer.iter_raw())
    with httpx.stream("GET", f"{a.url}/v1/streams/{there}/events", timeout=WAIT_S) as answer:
        assert next(answer.iter_lines()) == "event: state"
    question = {"model": there, "messages": [{"role": "user", "content": NOW}]}
    whole = httpx.post(f"{a.url}/v1/chat/completions", json=question, timeout=WAIT_S)
    assert whole.json()["choices"][0]["message"]["content"].strip().isdecimal()
    pieces = httpx.post(f"{a.url}/v1/chat/completions", json={**question, "stream": True}, timeout=WAIT_S).text
    assert pieces.rstrip().endswith("data: [DONE]")
    older = httpx.post(f"{a.url}/v1/completions", json={"model": there, "prompt": NOW}, timeout=WAIT_S)
    assert older.json()["choices"][0]["text"].strip().isdecimal()
    assert sorted(each["id"] for each in a.get("/v1/models").json()["data"]) == ["one", "two"]
    assert a.get("/v1/streams/onee").json()["error"]["message"] == "stream 'onee' not found; did you mean 'one'?"
    for path in (f"/v1/streams/{there}/events", "/v1/models/one"):
        assert httpx.delete(f"{a.url}{path}", timeout=WAIT_S).status_code == 405
    assert [each["id"] for each in b.get("/v1/nodes").json()["data"]] == ["a", "b"]
    described = b.app.openapi()
    schema = described["paths"]["/v1/streams"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": described["components"]}).validate(b.get("/v1/streams").json())


def test_a_frozen_node_neither_watches_nor_writes_once_another_may(cluster):
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    assert cluster.settle() == {"one": "a"}
    eventually(lambda: frames(a, "one") > 4)
    a.service.stream("one")._writer._snapshot()
    watch = {"name": "w", "question": "is there a red square?", "sinks": ["kept"]}
    assert httpx.post(f"{a.url}/v1/watches", json=watch, timeout=WAIT_S).status_code == 201
    cluster.settle()
    asked = a.service.watches.watch("w")
    event = WatchEvent("one", "w", "open", 1000.0, 0.9, 1000.0)
    a.service.watches.record(asked, event, ())
    for _ in range(3):
        cluster.now += (LEASE_S + GRACE_S) / 2
        b.step()
    assert not a.agent.may_watch("one")
    watched = frames(a, "one")
    assert cluster.settle("b") == {"one": "b"}
    stream = eventually(lambda: b.service.streams.get("one"))
    assert b.service.watches.last("one", "w").id == event.id
    eventually(lambda: event.id in [each.id for each in b.sent.events])
    eventually(lambda: frames(b, "one") > stream._writer.resumed.about["stream"]["frames"])
    assert frames(a, "one") <= watched + 1
    late = WatchEvent("one", "w", "close", 2000.0, 0.1, 1000.0)
    a.service.watches.record(asked, late, ())
    assert a.service.watches.last("one", "w").state == "open"
    assert httpx.post(
        f"{b.url}/v1/chat/completions", json={"model": "one", "messages": [{"role": "user", "content": NOW}]}
    ).is_success
    a.agent.work()  # it is back, and closes what it had
    assert a.agent.epochs == {}
    assert cluster.settle() == {"one": "b"}
    b.agent.work()
    assert b.get("/v1/streams/one").json()["lost_s"] >= 0
    assert any("are missing from memory" in line for line in b.notices)


def test_cameras_move_when_their_node_ends_and_the_head_goes_on_where_it_was(cluster):
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    assert cluster.settle() == {"one": "a"}
    eventually(lambda: frames(a, "one") > 4)
    cluster.head = Head(cluster.shared, lambda: cluster.now)
    assert cluster.settle() == {"one": "a"}
    a.agent._threads[0].start()
    a.agent._threads[1].start()
    closing = threading.Thread(target=a.agent.close)
    closing.start()
    eventually(lambda: (b.step(), cluster.where() == {"one": "b"})[1])
    closing.join()
    assert b.service.stream("one").resumed_at is not None
    assert list(cluster.head.call("view")["nodes"]) == ["b"]


def test_what_fits_nowhere_is_refused_with_the_reason(cluster, monkeypatch):
    plan = NodeAgent.plan  # memory, and frames a second of whatever machine this is
    monkeypatch.setattr(NodeAgent, "plan", lambda agent, model: (*plan(agent, model)[:2], 200.0))
    a = cluster.start("a", ["one"])
    cluster.settle()
    refused = httpx.post(f"{a.url}/v1/streams", json={"id": "fast", "source": "demo", "fps": 1000}, timeout=WAIT_S)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("fast does not fit on any node: it needs ")
    added = httpx.post(f"{a.url}/v1/streams", json={"id": "two", "source": "demo", "fps": 1}, timeout=WAIT_S)
    assert (added.status_code, added.json()["node"]) == (201, "a")
    assert cluster.settle() == {"one": "a", "two": "a"}
    assert httpx.delete(f"{a.url}/v1/streams/two", timeout=WAIT_S).status_code == 204
    assert cluster.settle() == {"one": "a"}
    with pytest.raises(UserError, match="node a already exists"):
        cluster.head.call("join", "a", "another", {"memory_bytes": 1}, {}, {}, __version__)


def test_a_camera_that_cannot_be_opened_says_why(cluster, monkeypatch):
    a = cluster.start("a")
    cluster.settle()
    monkeypatch.setattr(a.service, "add", Mock(side_effect=UserError("it does not answer")))
    assert httpx.post(f"{a.url}/v1/streams", json={"id": "three", "source": "demo"}, timeout=WAIT_S).status_code == 201
    a.step()
    a.step()
    assert a.agent.problems == {"three": "it does not answer"}


def test_a_reloaded_configuration_is_the_clusters(cluster):
    """Cameras and watches that one node's file names anew are the head's to place, and no node opens one by itself."""
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    weights, camera, _ = a.agent.plan("demo")
    a.agent._memory = b.agent._memory = weights + int(1.5 * camera)
    assert cluster.settle() == {"one": "a"}
    change = {"cameras": {"one": {"source": "demo"}, "two": {"source": "demo", "fps": 2.0}}}
    watch = {"name": "red", "question": "is there a red square now?", "every": 5.0}
    done = a.service.reload(ServeConfig(**{**a.service.config.model_dump(exclude_none=True), **change, "watches": [watch]}))
    assert done == ["two: added", "watch red: set on all nodes"]
    assert cluster.settle() == {"one": "a", "two": "b"}
    assert (list(a.service.streams), list(b.service.streams)) == (["one"], ["two"])
    assert set(a.service.watches.watches) == set(b.service.watches.watches) == {"red"}
    change = {"cameras": {"two": {"source": "demo", "fps": 3.0}}, "watches": []}
    done = a.service.reload(ServeConfig(**{**a.service.config.model_dump(exclude_none=True), **change}))
    assert done == ["one: removed", "two: reopened", "watch red: removed"]
    assert set(cluster.settle()) == {"two"}
    assert cluster.head.call("view")["cameras"]["two"]["settings"]["fps"] == 3.0
    assert not a.service.watches.watches


def test_a_model_of_the_hub_is_asked_for_until_the_hub_gives_it(cluster, monkeypatch):
    """By a thread of its own: the node goes on asking the head."""
    fetched, is_back = Mock(side_effect=[UserError("the hub is away"), "demo"]), threading.Event()
    monkeypatch.setattr("edgevlm.apps.cluster.agent.call_in_helper", fetched)
    agent = cluster.start("a").agent
    monkeypatch.setattr(agent, "_done", Mock(is_set=lambda: False, wait=lambda seconds: is_back.wait(WAIT_S)))
    agent._learn("ORG/NAME")
    eventually(lambda: agent.needs.get("ORG/NAME") == NOTHING)
    is_back.set()
    eventually(lambda: agent.needs["ORG/NAME"][:2] == agent.plan("demo")[:2])
    assert [call.args[1] for call in fetched.call_args_list] == ["ORG/NAME"] * 2


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_copy_that_was_cut_short_is_not_gone_on_from(tmp_path, kind):
    """A node died while it copied the folder of the epoch before: the next one begins from that."""
    pytest.importorskip("fsspec", reason="the extra [s3] is not installed")
    shared = Shared(f"file://{tmp_path}/shared" if kind == "folder" else f"memory://{tmp_path}/shared")
    shared.begin("one", 1, None)
    for name in ("1.snapshot", "2.snapshot", "events.json"):
        shared.write(f"one/epoch-1/{name}", b"x")
    shared.write("one/epoch-2/1.snapshot", b"x")
    assert shared.epochs("one") == [1]
    assert shared.epochs("one", unfinished=True) == [1, 2]
    shared.begin("one", 3, shared.epochs("one")[-1])
    assert shared.read("one/epoch-3/events.json") == b"x"
    for epoch in (1, 2):
        shared.delete("one", epoch)
    assert shared.epochs("one", unfinished=True) == [3]


def test_links_among_what_nodes_share_and_keep_are_not_followed(tmp_path):
    pytest.importorskip("fsspec", reason="the extra [s3] is not installed")
    mine, shared = tmp_path / "mine", Shared(str(tmp_path / "shared"))
    for name in ("epoch-1/1.snapshot", "one/1.snapshot"):
        (mine / name).parent.mkdir(parents=True)
        (mine / name).write_text("mine")
    before = sorted(mine.rglob("*"))
    shared.begin("two", 1, None)
    (tmp_path / "shared" / "one").symlink_to(mine)
    (tmp_path / "shared" / "two" / "epoch-2").symlink_to(mine / "epoch-1")
    for camera, epoch in (("one", 2), ("two", 2)):
        with pytest.raises(OSError, match="is a symbolic link"):
            shared.begin(camera, epoch, None)
        with pytest.raises(OSError, match="is a symbolic link"):
            shared.write(f"{camera}/epoch-{epoch}/events.json", b"x")
    for camera, epoch in (("one", 1), ("two", 2)):
        shared.delete(camera, epoch)
    service = Service(ServeConfig(state=str(tmp_path / "state")), print)
    service.state.mkdir()
    (service.state / "pictures").symlink_to(mine)
    agent = NodeAgent(service, Mock(side_effect=UserError("away")), "a", "", shared, 0, print)
    agent.start()
    agent._close("one")
    agent.close()
    service.close()
    assert sorted(mine.rglob("*")) == before
    assert {path.read_text() for path in before if path.is_file()} == {"mine"}


def test_what_was_switched_and_paused_over_http_stays_so_where_the_camera_moves(cluster):
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    assert cluster.settle() == {"one": "a"}
    eventually(lambda: frames(a, "one") > 4)
    a.service.stream("one")._writer._snapshot()
    watch = {"name": "w", "question": "is there a red square?"}
    assert httpx.post(f"{a.url}/v1/watches", json=watch, timeout=WAIT_S).status_code == 201
    cluster.settle()
    refused = httpx.patch(f"{b.url}/v1/streams/one", json={"policy": "nothing"}, timeout=WAIT_S)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "policy")
    watched = frames(a, "one")
    refused = httpx.patch(f"{b.url}/v1/streams/one", json={"budget": "1"}, timeout=WAIT_S)
    assert refused.status_code == 400
    assert frames(a, "one") >= watched  # it goes on with the memory that it had
    switched = patch(b, "/v1/streams/one", policy="sliding-window", budget=400)
    assert (switched["policy"], switched["epoch"], switched["node"]) == ("sliding-window", a.agent.epochs["one"], "a")
    eventually(lambda: frames(a, "one") > 4)
    assert patch(b, "/v1/watches/w", state="paused", camera="one")["cameras"][0]["paused"]
    assert patch(b, "/v1/streams/one", state="paused")["state"] == "paused"
    a.service.stream("one")._writer._snapshot()
    cluster.head = Head(cluster.shared, lambda: cluster.now)
    a.hears = False
    assert lose(cluster, "a") == {"one": "b"}
    there = b.get("/v1/streams/one").json()
    assert (there["state"], there["policy"], there["node"]) == ("paused", "sliding-window", "b")
    stream = b.service.stream("one")
    assert stream.settings.budget == 400
    watched = frames(a, "one")
    assert 0 < frames(b, "one") <= watched  # its memory, and no more
    assert stream.watcher.states()["w"]["paused"]
    patch(b, "/v1/watches/w", state="running")
    patch(b, "/v1/streams/one", state="running")
    assert not stream.watcher.states()["w"]["paused"]
    eventually(lambda: frames(b, "one") > watched)
    b.hears, a.hears = False, True
    a.agent.work()
    assert lose(cluster, "b") == {"one": "a"}
    assert not a.service.stream("one").paused
    assert not a.service.stream("one").watcher.states()["w"]["paused"]
