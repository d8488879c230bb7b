"""Real Ray on loopback: the head's actor and the head's machine, killed and back; resources that a node reserves."""

import socket

import psutil
import pytest
from served import WAIT_S, eventually

pytest.importorskip("ray")
pytest.importorskip("fastapi")

from edgevlm import __version__
from edgevlm.apps.cluster.head import HeadAway
from edgevlm.apps.cluster.member import join
from edgevlm.apps.cluster.ray_link import Joining, RayLink
from edgevlm.apps.serve.config import check_config
from edgevlm.apps.serve.service import Service
from edgevlm.errors import UserError


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer(link, method, *arguments):
    """What the head answers, once it does."""

    def once():
        try:
            return [link.call(method, *arguments)]
        except HeadAway:
            return None

    return eventually(once)[0]


def below(link):
    """Processes that the link has started."""
    return psutil.Process(link.helper.process.pid).children(recursive=True)


def raises_away(link):
    try:
        link.call("view")
    except HeadAway:
        return True
    return False


@pytest.mark.slow
def test_a_head_that_is_killed_is_back_with_what_it_knew(tmp_path):
    link = RayLink(Joining(f"127.0.0.1:{free_port()}", "127.0.0.1", True, str(tmp_path), "a", "secret"))
    try:
        given = {"settings": {"source": "demo"}, "model": "demo", "fps": 1.0, "only": None, "by_client": False}
        answer(link, "join", "a", "first", {"memory_bytes": 10**9, "url": "http://127.1"}, {"one": given}, {}, __version__)
        assert answer(link, "ask", "a", "first", [], {"demo": (10, 10, 100.0)})["orders"] == {"one": 1}
        with pytest.raises(UserError, match="stream one already exists"):
            answer(link, "add", "one", given)
        mine = below(link)
        head = next(each for each in mine if each.cmdline()[:1] == ["ray::Head"])
        head.kill()
        assert answer(link, "view")["cameras"]["one"]["epoch"] == 1
        assert answer(link, "ask", "a", "first", ["one"], {})["orders"] == {"one": 1}
        next(each for each in mine if each.name() == "raylet").kill()  # as it ends itself where the head has given it up
        eventually(lambda: raises_away(link))
        assert answer(link, "ask", "a", "first", ["one"], {})["orders"] == {"one": 1}
        mine += below(link)
    finally:
        link.close()
    assert not psutil.wait_procs(mine, WAIT_S)[1]


def test_what_a_node_needs_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEVLM_KEY", "correct-horse-battery")
    cluster, keyed = {"join": f"127.0.0.1:{free_port()}"}, {"key": "env:EDGEVLM_KEY"}
    at = {**cluster, "snapshots": str(tmp_path)}
    for server, wanted, said in (
        ({}, cluster, "give all nodes the same key with --key-file"),
        (keyed, cluster, "address for snapshots that all nodes share; add --set cluster.snapshots=DIR"),
        (keyed, at, "no cluster answers there; start one with --cluster head"),
    ):
        config = check_config({"state": str(tmp_path), "server": server, "cluster": wanted}, "test")
        with pytest.raises(UserError, match=said):
            join(Service(config, print), 8000, print)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--cluster needs the package ray, which is not installed: pip install"):
        join(Service(config, print), 8000, print)
