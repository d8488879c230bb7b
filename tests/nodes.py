"""Nodes of a cluster in one process, on real sockets, with a head that is called directly and a clock that is set."""

import json
import threading
from contextlib import ExitStack

import httpx
import pytest
from served import WAIT_S, eventually

pytest.importorskip("fastapi")

import uvicorn

from edgevlm.apps.cluster.agent import NodeAgent
from edgevlm.apps.cluster.director import GRACE_S, LEASE_S
from edgevlm.apps.cluster.head import Head, HeadAway
from edgevlm.apps.cluster.routes import ClusterRoutes
from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.run import uvicorn_config
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.sinks import Sink
from edgevlm.errors import UserError


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
        arguments = (name, self.url, Shared(cluster.shared), memory, self.notices.append, lambda: cluster.now)
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
            return json.loads(json.dumps(self.cluster.head.call(method, *arguments)))

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
            cameras = self.head.call("view")["cameras"]
            if where == before and all(each["node"] == where.get(name) for name, each in cameras.items()):
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
