"""Real Ray on loopback: the head's actor and the head's machine, killed and back; resources that a node reserves."""

import multiprocessing
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import psutil
import pytest
from served import WAIT_S, eventually

pytest.importorskip("ray")
pytest.importorskip("fastapi")

from edgevlm import __version__
from edgevlm.apps.cluster.head import HeadAway
from edgevlm.apps.cluster.member import join, redis_of
from edgevlm.apps.cluster.ray_link import START_S, Joining, RayLink
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


def raylets(link):
    return {each.pid for each in below(link) if "raylet" in each.name()}


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
        answer(link, "join", {"name": "a", "memory_bytes": 10**9}, "first", "http://127.1", {"one": given}, {}, __version__)
        assert answer(link, "ask", "a", "first", [], {"demo": (10, 10, 100.0)})["orders"] == {"one": 1}
        with pytest.raises(UserError, match="there is a stream one already"):
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


def hold(joining, up):
    link = RayLink(joining)
    link.wait()
    up.set()
    while True:
        time.sleep(1)


@contextmanager
def in_a_process_of_its_own(joining):
    context = multiprocessing.get_context("spawn")
    up = context.Event()
    process = context.Process(target=hold, args=(joining, up))
    process.start()
    try:
        assert up.wait(START_S)
        yield process
    finally:
        whole = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.join()
        assert not psutil.wait_procs(whole, WAIT_S)[1]  # Ray's processes end with the one that has started them


@pytest.mark.slow
def test_a_head_with_a_redis_finds_the_nodes_as_they_are(tmp_path):
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here")
    ports = [free_port(), free_port()]
    address, at = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    (tmp_path / "redis.conf").write_text("requirepass correct/horse\n")
    command = [
        "redis-server", str(tmp_path / "redis.conf"), "--bind", "127.0.0.1", "--port", str(ports[1]), "--save", "",
        "--dir", str(tmp_path),
    ]  # fmt: skip
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    head = Joining(address, "127.0.0.1", True, str(tmp_path), "a", "secret", f"redis://:correct%2Fhorse@{at}")
    link = RayLink(Joining(address, "127.0.0.2", False, str(tmp_path), "b", "secret"))
    try:
        given = {"settings": {"source": "demo"}, "model": "demo", "fps": 1.0, "only": None, "by_client": False}
        with in_a_process_of_its_own(head):
            link.wait()
            answer(link, "join", {"name": "b", "memory_bytes": 10**9}, "first", "http://127.1", {"one": given}, {}, __version__)
            assert answer(link, "ask", "b", "first", [], {"demo": (10, 10, 100.0)})["orders"] == {"one": 1}
            ray = raylets(link)
        with pytest.raises(HeadAway):
            link.call("view")
        with in_a_process_of_its_own(head):
            assert answer(link, "ask", "b", "first", ["one"], {})["orders"] == {"one": 1}
            assert ray
            assert ray == raylets(link)  # the same Ray, which has the same head by the handle that it had
    finally:
        link.close()
        redis.terminate()
        redis.wait()


def test_a_redis_with_a_password_is_read_and_never_repeated(tmp_path):
    (tmp_path / "redis").write_text("redis://:correct-horse@localhost:6379\n")
    assert redis_of(f"file:{tmp_path / 'redis'}") == redis_of("redis://:correct-horse@localhost:6379")
    for given in ("redis://:correct-horse@localhost", "correct-horse@localhost:6379", "redis://:correct horse@h:1"):
        with pytest.raises(UserError, match="give HOST:PORT, redis://:PASSWORD@HOST:PORT, or env:NAME") as refused:
            check_config({"cluster": {"redis": given}}, "test")
        assert "horse" not in str(refused.value)
        (tmp_path / "redis").write_text(given)
        with pytest.raises(UserError, match="holds no HOST:PORT") as refused:
            redis_of(f"file:{tmp_path / 'redis'}")
        assert "horse" not in str(refused.value)


def test_what_a_node_needs_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEVLM_KEY", "correct-horse-battery")
    cluster, keyed = {"join": f"127.0.0.1:{free_port()}"}, {"key": "env:EDGEVLM_KEY"}
    at = {**cluster, "snapshots": str(tmp_path)}
    for server, wanted, said in (
        ({}, cluster, "give all nodes the same key with --key-file"),
        (keyed, cluster, "give a folder or an address that all nodes share: --set cluster.snapshots=DIR"),
        (keyed, at, "no cluster answers there; start one with --cluster head"),
    ):
        config = check_config({"state": str(tmp_path), "server": server, "cluster": wanted}, "test")
        with pytest.raises(UserError, match=said):
            join(Service(config, print), 8000, print)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--cluster needs the package ray, which is not installed: pip install"):
        join(Service(config, print), 8000, print)
