"""Nodes of a cluster in one process, on real sockets, with a head that is called directly and a clock that is set."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from buckets import bucket
from jsonschema import Draft202012Validator
from served import NOW, WAIT_S, eventually

pytest.importorskip("fastapi")

import uvicorn

from edgevlm.apps.cluster.agent import HeadAway, NodeAgent
from edgevlm.apps.cluster.director import GRACE_S, LEASE_S
from edgevlm.apps.cluster.head import Head
from edgevlm.apps.cluster.routes import ClusterRoutes
from edgevlm.apps.cluster.shared import SharedStore, shared_at
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.run import uvicorn_config
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.sinks import Sink
from edgevlm.errors import UserError
from edgevlm.runtime.snapshots.encryption import SnapshotKey

__all__ = ["bucket"]


class Kept(Sink):
    def __init__(self):
        self.events = []

    def send(self, event, pictures):
        self.events.append(event)


class Node:
    """A node whose agent takes a step when it is told to."""

    def __init__(self, cluster, name, cameras, memory=4_000_000_000):
        config = {
            **cluster.config,
            "state": str(cluster.folder / name),
            "fps": 20.0,
            "cameras": {each: {"source": "demo"} for each in cameras},
        }
        self.cluster, self.name, self.notices, self.hears, self.sent = cluster, name, [], True, Kept()
        self.service = Service(ServeConfig(**config, threads=1), self.notices.append, sinks={"kept": self.sent})
        listening = uvicorn.Config(None, port=0).bind_socket()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        arguments = (name, self.url, shared_at(cluster.shared), memory, self.notices.append, lambda: cluster.now)
        self.agent = NodeAgent(self.service, self.call, *arguments)
        self.app = make_app(self.service)
        self.server = uvicorn.Server(uvicorn_config(ClusterRoutes(self.app, self.service, self.agent), self.service))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]})
        self.thread.start()
        eventually(lambda: self.server.started)

    def call(self, method, *arguments):
        if not self.hears:
            raise HeadAway("cut off")
        with self.cluster.lock:
            return getattr(self.cluster.head, method)(*arguments)

    def step(self):
        try:
            self.agent.ask()
        except (UserError, HeadAway):
            return
        self.agent.work()

    def get(self, path, **options):
        return httpx.get(f"{self.url}{path}", timeout=WAIT_S, **options)

    def end(self):
        self.app.state.server.closing.set()
        self.server.should_exit = True
        self.thread.join()
        self.service.close()


class Cluster:
    def __init__(self, folder, shared=None):
        self.folder, self.now, self.nodes, self.lock = folder, 0.0, {}, threading.RLock()
        self.config = {}
        self.shared = shared or str(folder / "shared")
        self.head = Head(self.shared, lambda: self.now)

    def start(self, name, cameras=(), **options):
        self.nodes[name] = Node(self, name, cameras, **options)
        return self.nodes[name]

    def settle(self, *names):
        """Steps of these nodes, of all unless given, until nothing changes; where each camera is watched."""
        before = None
        while True:
            for name in names or self.nodes:
                self.nodes[name].step()
            where = self.where()
            if where == before and all(each["node"] == where.get(name) for name, each in self.head.view()["cameras"].items()):
                return where
            before = where

    def where(self):
        """Node by camera; no camera has two."""
        found = [
            (camera, name)
            for name, node in self.nodes.items()
            for camera in list(node.agent.epochs)
            if node.agent.may_watch(camera)
        ]
        assert len(found) == len(dict(found)), found
        return dict(found)


@pytest.fixture
def cluster(tmp_path):
    with ExitStack() as stack:
        made = Cluster(tmp_path)
        stack.callback(lambda: [node.end() for node in made.nodes.values()])
        yield made


def frames(node, camera):
    return node.service.stream(camera).session.stats.frames


def test_any_node_answers_for_all_cameras(cluster):
    a, b = cluster.start("a", ["one", "two"]), cluster.start("b")
    weights, camera, _ = a.agent._need("demo")
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
    assert sorted(each["id"] for each in a.get("/v1/models").json()["data"]) == ["one", "two"]
    assert a.get("/v1/streams/onee").json()["error"]["message"] == "there is no stream 'onee'; did you mean 'one'?"
    assert [each["id"] for each in b.get("/v1/nodes").json()["data"]] == ["a", "b"]
    described = b.app.openapi()["paths"]
    for path in ("/v1/nodes", "/v1/streams"):
        schema = described[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator(schema).validate(b.get(path).json())


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
    assert any("are not remembered" in line for line in b.notices)


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
    assert list(cluster.head.view()["nodes"]) == ["b"]


def test_a_camera_that_is_about_to_be_opened_is_not_given_away(cluster):
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    for node in (a, b, a):  # the last answer orders it; nothing has been opened yet
        node.agent.ask()
    assert a.agent._lease.orders == {"one": 1}
    b.agent.ask()
    cluster.head.leave("a", a.agent.instance)
    a.agent.ask()
    assert cluster.head.view()["cameras"]["one"]["node"] == "a"
    a.agent.ask()  # by now it knows
    assert cluster.head.view()["cameras"]["one"]["node"] == "b"


def test_what_fits_nowhere_is_refused_with_the_reason(cluster):
    a = cluster.start("a", ["one"])
    cluster.settle()
    refused = httpx.post(f"{a.url}/v1/streams", json={"id": "fast", "source": "demo", "fps": 1000}, timeout=WAIT_S)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("fast fits on no node: it takes ")
    added = httpx.post(f"{a.url}/v1/streams", json={"id": "two", "source": "demo", "fps": 1}, timeout=WAIT_S)
    assert (added.status_code, added.json()["node"]) == (201, "a")
    assert cluster.settle() == {"one": "a", "two": "a"}
    assert httpx.delete(f"{a.url}/v1/streams/two", timeout=WAIT_S).status_code == 204
    assert cluster.settle() == {"one": "a"}
    with pytest.raises(UserError, match="there is a node a already"):
        cluster.head.join({"name": "a", "memory_bytes": 1}, "another", "http://x", {}, {})


def test_a_reloaded_configuration_is_the_clusters(cluster):
    """Cameras and watches that one node's file names anew are the head's to place, and no node opens one by itself."""
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    weights, camera, _ = a.agent._need("demo")
    a.agent._memory = b.agent._memory = weights + int(1.5 * camera)
    assert cluster.settle() == {"one": "a"}
    change = {"cameras": {"one": {"source": "demo"}, "two": {"source": "demo", "fps": 2.0}}}
    watch = {"name": "red", "question": "is there a red square now?", "every": 5.0}
    done = a.service.reload(ServeConfig(**{**a.service.config.model_dump(exclude_none=True), **change, "watches": [watch]}))
    assert done == ["two: added", "watch red: asked on all nodes"]
    assert cluster.settle() == {"one": "a", "two": "b"}
    assert (list(a.service.streams), list(b.service.streams)) == (["one"], ["two"])
    assert set(a.service.watches.watches) == set(b.service.watches.watches) == {"red"}
    change = {"cameras": {"two": {"source": "demo", "fps": 3.0}}, "watches": []}
    done = a.service.reload(ServeConfig(**{**a.service.config.model_dump(exclude_none=True), **change}))
    assert done == ["one: removed", "two: opened again", "watch red: removed"]
    assert set(cluster.settle()) == {"two"}
    assert cluster.head.view()["cameras"]["two"]["settings"]["fps"] == 3.0
    assert not a.service.watches.watches


@pytest.mark.parametrize("change", [b"{", b"[]", b'{"director": 1}', None])
def test_a_heads_file_that_cannot_be_read_is_said_in_a_line(cluster, change):
    a = cluster.start("a", ["one"])
    cluster.settle()
    file = cluster.folder / "shared" / "cluster.json"
    file.write_bytes(file.read_bytes().replace(b'"epoch":1', b'"epoch":"x"') if change is None else change)
    with pytest.raises(UserError, match=r"cluster\.json: is no head's \(.*\); move it away to begin without it") as error:
        Head(cluster.shared)
    assert "\n" not in str(error.value)
    assert a.name == "a"


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_copy_that_was_cut_short_is_not_gone_on_from(tmp_path, kind):
    """A node died while it copied the folder of the epoch before: the next one begins from that."""
    pytest.importorskip("fsspec", reason="the extra [s3] is not installed")
    shared = shared_at(f"file://{tmp_path}/shared" if kind == "folder" else f"memory://{tmp_path}/shared")
    shared.begin("one", 1, None)
    for name in ("1.snapshot", "2.snapshot", "events.json"):
        shared.write(f"one/epoch-1/{name}", b"x")
    if kind == "folder":
        (tmp_path / "shared" / "one" / "epoch-2.unfinished").mkdir()
    else:
        shared.write("one/epoch-2/1.snapshot", b"x")
    assert shared.epochs("one") == [1]
    assert shared.epochs("one", unfinished=True) == [1, 2]
    shared.begin("one", 3, shared.epochs("one")[-1])
    assert shared.read("one/epoch-3/events.json") == b"x"
    for epoch in (1, 2):
        shared.delete("one", epoch)
    assert shared.epochs("one", unfinished=True) == [3]


def patch(node, path, **change):
    done = httpx.patch(f"{node.url}{path}", json=change, timeout=WAIT_S)
    assert done.status_code == 200, done.text
    return done.json()


def lose(cluster, name):
    """A node is given up; what others have does not change hands."""
    others = [node for node in cluster.nodes if node != name]
    for _ in range(3):
        cluster.now += (LEASE_S + GRACE_S) / 2
        for node in others:
            cluster.nodes[node].step()
    return cluster.settle(*others)


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


def test_a_switch_that_cannot_be_opened_leaves_the_memory_as_it_was(cluster, monkeypatch):
    a = cluster.start("a", ["one"])
    cluster.settle()
    eventually(lambda: frames(a, "one") > 4)
    watched, add = frames(a, "one"), a.service.add

    def refuse(name, settings, *more):
        if settings.policy == "sliding-window":
            raise UserError("no such luck")
        return add(name, settings, *more)

    monkeypatch.setattr(a.service, "add", refuse)
    refused = httpx.patch(f"{a.url}/v1/streams/one", json={"policy": "sliding-window"}, timeout=WAIT_S)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no such luck")
    assert a.service.stream("one").settings.policy == "auto"
    assert frames(a, "one") >= watched


def test_a_watch_is_paused_on_a_camera_of_another_node(cluster):
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    assert cluster.settle() == {"one": "a"}
    watch = {"name": "w", "question": "is there a red square?"}
    assert httpx.post(f"{a.url}/v1/watches", json=watch, timeout=WAIT_S).status_code == 201
    cluster.settle()
    assert patch(b, "/v1/watches/w", state="paused", camera="one")["cameras"][0]["paused"]
    (standing,) = b.get("/v1/watches/w").json()["cameras"]
    assert (standing["camera"], standing["paused"]) == ("one", True)
    unknown = httpx.patch(f"{b.url}/v1/watches/w", json={"state": "paused", "camera": "onee"}, timeout=WAIT_S)
    assert unknown.json()["error"]["message"] == "there is no stream 'onee'; did you mean 'one'?"


def ask_to_forget(node, **what):
    done = httpx.post(f"{node.url}/v1/forget", json={**what, "confirm": True}, timeout=WAIT_S)
    assert done.status_code == 200, done.text
    return done.json()


def an_event(camera):
    """Of an hour ago."""
    at = time.time() - 3600
    return WatchEvent(camera, "w", "open", at, 0.9, at)


def events(node, camera):
    return [each.watch for each in node.service.delivery.store.query(camera=camera)]


def watched_with_events(cluster, *cameras):
    """Two nodes, of which the first watches the cameras, each with a snapshot and an event; a third has events, and is away."""
    a, b, c = cluster.start("a", cameras), cluster.start("b"), cluster.start("c")
    a.agent._memory = 16_000_000_000
    assert set(cluster.settle("a").values()) == {"a"}
    watch = {"name": "w", "question": "is there a red square?", "sinks": ["kept"], "every": 600_000.0, "open_after": 600_000.0}
    assert httpx.post(f"{a.url}/v1/watches", json=watch, timeout=WAIT_S).status_code == 201
    cluster.settle()
    assert set(cluster.where().values()) == {"a"}
    for camera in cameras:
        eventually(lambda camera=camera: a.service.stream(camera).session.stats.tokens > 0)
        a.service.stream(camera)._writer._snapshot()
        a.service.watches.record(a.service.watches.watch("w"), an_event(camera), ())
        c.service.delivery.store.record(an_event(camera))
    c.hears = False
    return a, b, c


def test_forgetting_through_any_node_reaches_memory_snapshots_and_a_node_that_was_away(cluster):
    a, b, c = watched_with_events(cluster, "one", "two")
    told = ask_to_forget(b, stream="one", all=True)
    assert told["waiting"] == ["c"]
    assert told["streams"]["one"]["events"] == 1
    assert (events(a, "one"), events(a, "two")) == ([], ["w"])
    assert a.service.stream("one").resumed_at is None
    assert cluster.settle("a", "b") == {"one": "a", "two": "a"}
    shared = cluster.folder / "shared"
    assert [path.name for path in (shared / "one").glob("epoch-*")] == ["epoch-2"]
    assert not list((shared / "one").glob("*/*.snapshot"))
    assert list((shared / "two").glob("*/*.snapshot"))
    assert events(c, "one") == ["w"]
    cluster.head = Head(cluster.shared, lambda: cluster.now)  # it knows what is still to be forgotten
    c.hears = True
    c.step()
    c.step()
    assert (events(c, "one"), events(c, "two")) == ([], ["w"])
    b.step()
    assert b.agent.view["notes"] == []


def test_a_node_that_does_not_come_back_is_removed_and_if_it_does_it_joins_emptied(cluster):
    _, b, c = watched_with_events(cluster, "one", "two")

    def remove(name):
        return httpx.delete(f"{b.url}/v1/nodes/{name}", timeout=WAIT_S)

    assert (remove("c").status_code, remove("c").json()["error"]["message"][:15]) == (400, "node c is there")
    lose(cluster, "c")
    assert ask_to_forget(b, stream="one", all=True)["waiting"] == ["c"]
    listed = {each["id"]: each["heard_s"] for each in b.get("/v1/nodes").json()["data"]}
    assert (set(listed), listed["c"]) == ({"a", "b", "c"}, None)
    assert remove("cc").json()["error"]["message"] == "there is no node 'cc'; did you mean 'c'?"
    assert remove("c").status_code == 204
    assert b.agent.view["notes"] == []
    assert [each["id"] for each in b.get("/v1/nodes").json()["data"]] == ["a", "b"]
    assert ask_to_forget(b, stream="two", since="600s")["waiting"] == []
    assert remove("c").status_code == 404
    cluster.head = Head(cluster.shared, lambda: cluster.now)
    c.hears = True
    cluster.settle("c")
    assert (events(c, "one"), events(c, "two")) == ([], [])
    assert "c" in cluster.head.view()["nodes"]
    c.service.delivery.store.record(an_event("one"))
    c.hears = False
    lose(cluster, "c")
    c.hears = True
    cluster.settle("c")
    assert events(c, "one") == ["w"]  # once


def test_what_is_forgotten_while_its_node_is_cut_off_does_not_come_back(cluster):
    a, b, _ = watched_with_events(cluster, "one", "two")
    a.hears = False
    seen = a.service.stream("two").observer.thumbnails.taken()
    told = ask_to_forget(b, stream="one", all=True)
    assert told["waiting"] == ["a", "c", "one"]
    told = ask_to_forget(b, stream="two", since="600s")  # all of it, but not the old event
    assert told["waiting"] == ["a", "c", "two"]
    assert lose(cluster, "a") == {"one": "b", "two": "b"}
    assert b.service.stream("one").resumed_at is None
    assert events(b, "one") == []
    assert events(b, "two") == ["w"]
    assert seen
    assert not {*seen} & {*b.service.stream("two").observer.thumbnails.taken()}
    later = replace(an_event("one"), time=time.time(), opened=time.time())  # seen after it
    b.service.watches.record(b.service.watches.watch("w"), later, ())
    a.hears = True
    a.agent.work()
    cluster.settle("a", "b")
    assert (events(a, "one"), events(a, "two")) == ([], ["w"])
    assert [path.name for path in (cluster.folder / "shared" / "one").glob("epoch-*")] == [f"epoch-{b.agent.epochs['one']}"]
    assert events(b, "one") == ["w"]


def test_a_removed_camera_is_forgotten_and_begins_anew_when_it_is_added_again(cluster):
    a, b, _ = watched_with_events(cluster, "one", "two")
    for camera in ("one", "two"):
        assert httpx.delete(f"{a.url}/v1/streams/{camera}", timeout=WAIT_S).status_code == 204
    cluster.settle("a", "b")
    shared = cluster.folder / "shared"
    assert list((shared / "one").glob("*/*.snapshot"))
    ask_to_forget(b, stream="one", all=True)
    assert not list((shared / "one").glob("epoch-*"))
    assert list((shared / "two").glob("*/*.snapshot"))
    assert ask_to_forget(b, stream="two", since="600s")["streams"]["two"]["rows"] > 0
    unknown = httpx.post(f"{b.url}/v1/forget", json={"stream": "onee", "all": True, "confirm": True}, timeout=WAIT_S)
    assert unknown.json()["error"]["message"] == "there is no stream 'onee'; did you mean 'one'?"
    for camera in ("one", "two"):
        added = httpx.post(f"{b.url}/v1/streams", json={"id": camera, "source": "demo"}, timeout=WAIT_S)
        assert added.status_code == 201
    where = cluster.settle("a", "b")
    assert cluster.nodes[where["one"]].service.stream("one").resumed_at is None
    assert cluster.nodes[where["two"]].service.stream("two").resumed_at is not None


def test_a_policy_that_forgets_all_or_nothing_is_told_of_and_holds_up_nothing(cluster):
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    cluster.settle()
    patch(a, "/v1/streams/one", policy="rekv")
    eventually(lambda: a.service.stream("one").session.stats.tokens > 0)
    refused = httpx.post(f"{b.url}/v1/forget", json={"since": "600s", "confirm": True}, timeout=WAIT_S)
    assert refused.status_code == 400
    assert "forget --all" in refused.json()["error"]["message"]
    cluster.settle()
    assert a.agent.view["notes"] == []
    assert ask_to_forget(b, all=True)["waiting"] == []
    assert cluster.settle() == {"one": "a"}


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_snapshots_on_an_object_store_move_encrypted_and_are_forgotten(cluster, kind, request):
    pytest.importorskip("pyrage", reason="the extra [encryption] is not installed")
    pytest.importorskip("fsspec", reason="the extra [s3] is not installed")
    address = f"memory://{cluster.folder}/shop" if kind == "memory" else request.getfixturevalue("bucket").address
    (cluster.folder / "key").write_text(SnapshotKey.generate())
    cluster.config = {"state_key": f"file:{cluster.folder / 'key'}"}
    cluster.shared = address
    cluster.head = Head(address, lambda: cluster.now)
    a, b = cluster.start("a", ["one"]), cluster.start("b")
    assert cluster.settle() == {"one": "a"}
    eventually(lambda: a.service.stream("one").session.stats.tokens > 0)
    watch = {"name": "w", "question": "is there a red square?", "every": 600_000.0, "open_after": 600_000.0}
    assert httpx.post(f"{a.url}/v1/watches", json=watch, timeout=WAIT_S).status_code == 201
    cluster.settle()
    event = an_event("one")
    a.service.watches.record(a.service.watches.watch("w"), event, ())
    watched, files = frames(a, "one"), SharedStore(address)._store.files
    a.service.stream("one")._writer._snapshot()
    snapshot_at = frames(a, "one")
    eventually(lambda: frames(a, "one") > snapshot_at + 1)
    (kept,) = files.glob(f"{address}/one/epoch-1/*.snapshot")
    assert files.cat_file(kept).startswith(b"age-encryption.org")
    cluster.head = Head(address, lambda: cluster.now)
    a.hears = False
    assert lose(cluster, "a") == {"one": "b"}
    assert b.service.stream("one").resumed_at is not None
    assert frames(b, "one") >= watched
    assert b.service.watches.last("one", "w").id == event.id
    assert SharedStore(address).epochs("one") == [2]
    ask_to_forget(b, stream="one", all=True)
    assert not files.glob(f"{address}/one/epoch-2/*")
    assert b.service.stream("one").resumed_at is None
    a.hears = True
    a.agent.work()  # it closes what it had, with a last snapshot, which goes too
    cluster.settle()
    assert SharedStore(address).epochs("one", unfinished=True) == [3]
