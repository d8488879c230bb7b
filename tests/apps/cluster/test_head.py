"""A head alone: two of them over one folder, what it tells a node, and what it makes of failures."""

import threading
from unittest.mock import Mock

import pytest

from edgevlm import __version__
from edgevlm.apps.cluster.director import GRACE_S, LEASE_S
from edgevlm.apps.cluster.head import LOOK_S, Head
from edgevlm.errors import UserError

CAMERA = {"settings": {"source": "demo"}, "model": "demo", "fps": 1.0, "only": None, "by_client": False}
ABOUT = {"memory_bytes": 10**9, "url": "http://a"}
NEED = {"demo": (10, 10, 100.0)}


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_of_two_heads_over_one_folder_only_the_newer_gives_out_cameras(tmp_path, kind):
    """The first one's machine was only cut off, and another was started elsewhere."""
    pytest.importorskip("fsspec", reason="the extra [s3] is not installed")
    now, where = 0.0, str(tmp_path) if kind == "folder" else f"memory://me:horse@{tmp_path}/shared"
    first = Head(where, lambda: now)
    first.call("join", "a", "process", ABOUT, {"one": CAMERA}, {}, __version__)
    assert first.call("ask", "a", "process", [], NEED)["orders"] == {"one": 1}
    second = Head(where, lambda: now)
    with pytest.raises(UserError, match=r"another head was started on .* and took over; stop this head") as refused:
        first.call("change", "one", {"paused": True})
    assert "horse" not in str(refused.value)
    now = LOOK_S
    for give in (
        lambda: first.call("ask", "a", "process", ["one"], NEED),
        lambda: first.call("join", "b", "x", ABOUT, {}, {}, __version__),
    ):
        with pytest.raises(UserError, match="another head was started"):
            give()
    assert second.call("ask", "a", "process", ["one"], NEED)["orders"] == {"one": 1}
    second.call("join", "b", "another", ABOUT, {}, {}, __version__)
    second.call("ask", "b", "another", [], NEED)
    now += LEASE_S + GRACE_S
    assert second.call("ask", "b", "another", [], NEED)["orders"] == {}
    now += 0.1
    second.call("ask", "b", "another", [], NEED)
    assert second.call("ask", "b", "another", [], NEED)["orders"] == {"one": 2}


def test_a_head_whose_folder_is_away_or_hangs_goes_on(tmp_path, monkeypatch):
    now = 0.0
    head, hangs = Head(str(tmp_path), lambda: now), threading.Event()
    head.call("join", "a", "process", ABOUT, {"one": CAMERA}, {}, __version__)
    head.call("ask", "a", "process", [], NEED)
    monkeypatch.setattr("edgevlm.apps.cluster.head.LOOKING_S", 0.0)
    for read in (Mock(side_effect=OSError("away")), lambda name: hangs.wait() and b"?"):
        monkeypatch.setattr(head._shared, "read", read)
        for _ in range(2):
            now += LOOK_S
            assert head.call("ask", "a", "process", ["one"], NEED)["orders"] == {"one": 1}
    hangs.set()


def test_a_node_is_sent_the_view_once_it_changed_and_nothing_is_saved_for_an_ask(tmp_path, monkeypatch):
    head, mark = Head(str(tmp_path), lambda: 0.0), None
    head.call("join", "a", "process", ABOUT, {"one": CAMERA, "two": CAMERA}, {}, __version__)

    def ask():
        nonlocal mark
        told = head.call("ask", "a", "process", ["one"], NEED, 0, {}, mark)
        mark = told["mark"]
        return told["view"]

    assert ask() == head.call("view")
    with monkeypatch.context() as patched:
        patched.setattr(head._shared, "write", Mock(side_effect=AssertionError))
        assert ask() is None
    head.call("change", "one", {"paused": True})
    assert ask()["cameras"]["one"]["paused"]
    head = Head(str(tmp_path), lambda: 0.0)
    assert ask() == head.call("view")
    head.call("remove", "two")
    assert list(ask()["removed"]) == ["two"]


def test_only_nodes_of_the_same_minor_version_go_together(tmp_path, monkeypatch):
    monkeypatch.setattr("edgevlm.apps.cluster.director.__version__", "1.4.2")
    head = Head(str(tmp_path), lambda: 0.0)
    for version in ("1.4.0", "1.4.3.dev1"):
        head.call("join", version, "process", ABOUT, {}, {}, version)
    for version in ("1.3.9", "1.40.2", "2.4.2"):
        with pytest.raises(UserError, match=rf"node b runs edgevlm {version} but the head runs 1\.4\.2: .* stop all nodes"):
            head.call("join", "b", "process", ABOUT, {}, {}, version)


def test_a_head_that_does_not_start_leaves_the_one_that_runs(tmp_path):
    now, file = 0.0, tmp_path / "cluster.json"
    head = Head(str(tmp_path), lambda: now)
    head.call("join", "a", "process", ABOUT, {"one": CAMERA}, {}, __version__)
    good = file.read_bytes()
    file.write_bytes(b"{")
    with pytest.raises(UserError, match="is not a head's state"):
        Head(str(tmp_path), lambda: now)
    file.write_bytes(good)
    now = 2 * LOOK_S
    assert head.call("ask", "a", "process", [], NEED)["orders"] == {"one": 1}


def test_what_is_written_after_another_head_was_started_is_told_to_nobody(tmp_path, monkeypatch):
    head = Head(str(tmp_path), lambda: 0.0)
    head.call("join", "a", "process", ABOUT, {}, {}, __version__)
    head.call("ask", "a", "process", [], NEED)
    write = head._shared.write

    def write_late(name, data):
        Head(str(tmp_path), lambda: 0.0)
        write(name, data)

    monkeypatch.setattr(head._shared, "write", write_late)
    with pytest.raises(UserError, match="another head was started"):
        head.call("add", "one", CAMERA)
    with pytest.raises(UserError, match="another head was started"):
        head.call("ask", "a", "process", [], NEED)


def test_a_camera_whose_removal_was_not_saved_at_once_can_be_added_again(tmp_path, monkeypatch):
    now = 0.0
    head = Head(str(tmp_path), lambda: now)
    head.call("join", "a", "process", ABOUT, {"one": CAMERA}, {}, __version__)
    assert head.call("ask", "a", "process", [], NEED)["orders"] == {"one": 1}
    with monkeypatch.context() as patched:
        patched.setattr(head._shared, "write", Mock(side_effect=OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            head.call("remove", "one")
    now = LOOK_S
    assert head.call("ask", "a", "process", [], NEED)["orders"] == {}
    head.call("add", "one", CAMERA)
    assert head.call("ask", "a", "process", [], NEED)["orders"] == {"one": 2}
