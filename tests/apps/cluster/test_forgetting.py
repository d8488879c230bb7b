"""What is forgotten through any node is forgotten by all: memories, snapshots, and nodes that were away."""

import time
from dataclasses import replace

import httpx
import pytest
from buckets import bucket
from nodes import cluster, frames, lose, patch
from served import WAIT_S, eventually

from edgevlm.apps.cluster.head import Head
from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.run.clock import Span
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.errors import UserError
from edgevlm.runtime.snapshots.directory import SnapshotKey

__all__ = ["bucket", "cluster"]


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


def test_a_node_that_does_not_come_back_is_removed_and_its_name_is_not_taken_again(cluster):
    _, b, c = watched_with_events(cluster, "one", "two")

    def remove(name):
        return httpx.delete(f"{b.url}/v1/nodes/{name}", timeout=WAIT_S)

    assert (remove("c").status_code, remove("c").json()["error"]["message"][:15]) == (400, "node c is still")
    lose(cluster, "c")
    assert ask_to_forget(b, stream="one", all=True)["waiting"] == ["c"]
    listed = {each["id"]: each["heard_s"] for each in b.get("/v1/nodes").json()["data"]}
    assert (set(listed), listed["c"]) == ({"a", "b", "c"}, None)
    assert remove("cc").json()["error"]["message"] == "node 'cc' not found; did you mean 'c'?"
    assert remove("c").status_code == 204
    assert b.agent.view["notes"] == []
    assert [each["id"] for each in b.get("/v1/nodes").json()["data"]] == ["a", "b"]
    assert ask_to_forget(b, stream="two", since="600s")["waiting"] == []
    assert remove("c").status_code == 404
    cluster.head = Head(cluster.shared, lambda: cluster.now)
    c.hears = True
    for why in ("node c is no longer in the cluster", "node c was removed from the cluster"):
        with pytest.raises(UserError, match=why):
            c.agent.ask()
    assert "c" not in cluster.head.call("view")["nodes"]
    assert (events(c, "one"), events(c, "two")) == (["w"], ["w"])  # nothing of a machine's own is deleted for its name


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
    assert unknown.json()["error"]["message"] == "stream 'onee' not found; did you mean 'one'?"
    for camera in ("one", "two"):
        added = httpx.post(f"{b.url}/v1/streams", json={"id": camera, "source": "demo"}, timeout=WAIT_S)
        assert added.status_code == 201
    where = cluster.settle("a", "b")
    assert cluster.nodes[where["one"]].service.stream("one").resumed_at is None
    assert cluster.nodes[where["two"]].service.stream("two").resumed_at is not None


@pytest.mark.parametrize("where", ["folder", "objects"])
def test_a_node_that_was_away_writes_nothing_that_was_forgotten_of_removed_cameras(cluster, where):
    if where == "objects":
        pytest.importorskip("fsspec", reason="the extra [s3] is not installed")
        cluster.shared = f"memory://{cluster.folder}/shop"
        cluster.head = Head(cluster.shared, lambda: cluster.now)
    a, b, _ = watched_with_events(cluster, "one", "two")
    a.hears = False
    for camera in ("one", "two"):
        assert httpx.delete(f"{b.url}/v1/streams/{camera}", timeout=WAIT_S).status_code == 204
    ask_to_forget(b, stream="one", all=True)
    span = {"stream": "two", "since": "600s", "confirm": True}
    forgotten = httpx.post(f"{b.url}/v1/forget", json=span, timeout=WAIT_S)  # a folder is in use by the node that has it open
    assert forgotten.status_code == (200 if where == "objects" else 400)
    lose(cluster, "a")
    a.agent.work()  # it closes what it had, as soon as it may watch no longer, and hears of all that only then
    a.hears = True
    assert cluster.settle("a", "b") == {}
    assert not a.service.streams
    shared = Shared(cluster.shared)
    assert shared.epochs("one", unfinished=True) == []
    (epoch,) = shared.epochs("two")
    assert b.service.forget_at(shared.where("two", epoch), Span(0.0, time.time()))["rows"] == 0


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
    watched, files = frames(a, "one"), Shared(address)._files
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
    assert Shared(address).epochs("one") == [2]
    ask_to_forget(b, stream="one", all=True)
    assert not files.glob(f"{address}/one/epoch-2/*")
    assert b.service.stream("one").resumed_at is None
    a.hears = True
    a.agent.work()  # it closes what it had, with a last snapshot, which goes too
    cluster.settle()
    assert Shared(address).epochs("one", unfinished=True) == [3]
