"""This machine's part of a Ray cluster, in a process of its own: Ray ends a process that has lost its cluster."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from edgevlm.apps.cluster.head import HeadAway
from edgevlm.errors import UserError

NAMESPACE = "edgevlm"
PORT = 6379
OBJECTS = 80_000_000  # bytes of Ray's object store, the least it takes: no frames go through it
HUNG_S = 60.0  # that the helper process may take, on a machine that does much else
ANSWER_S = 10.0  # that the head may take
RESERVE_S = 5.0  # that Ray may take to reserve resources
START_S = 300.0  # that Ray may take to start and to find its head
BACKOFF_S = 5.0
AWAY_S = 600.0  # without an answer after which Ray is started anew
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Joining:
    """How a node joins. address: HOST:PORT of the head; ip: of this node; is_head: starts the cluster there.

    folder: of the head's state. resources: Ray's custom ones, of this node. secret: that all nodes share. redis: HOST:PORT, or
    redis://:PASSWORD@HOST:PORT, where Ray keeps what it knows, so that a head which is started again finds the nodes as it left
    them.
    """

    address: str
    ip: str
    is_head: bool
    folder: str
    resources: Mapping[str, float]
    secret: str
    own: str  # among them: the one that no other node has
    redis: str | None = None


class RayLink:
    """Calls the head of a cluster. A helper process starts Ray, and is started again where it is lost."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._thread = ThreadPoolExecutor(1, "edgevlm-ray")  # one: its end would end the helper, by _end_with_parent
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._began, self._heard, self._ready = 0.0, 0.0, False
        self._reserved: dict[str, dict[str, float]] = {}

    def call(self, method: str, *arguments: Any) -> Any:
        """What the head answers. Raises HeadAway, and UserError as the head does."""
        return self._thread.submit(self._call, method, arguments).result()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        pipe = self._started()
        try:
            pipe.send((method, arguments))
            if not pipe.poll(HUNG_S):
                raise EOFError
            kind, answer = pipe.recv()
        except (OSError, EOFError):
            self._end()
            raise HeadAway("the link to it has ended") from None
        if kind == "away":
            if not self._joining.is_head and time.monotonic() > self._heard + AWAY_S:  # it may be another cluster by now
                self._end()
            raise HeadAway(answer)
        self._heard = time.monotonic()
        if kind == "user":
            raise UserError(answer)
        return answer

    @property
    def pid(self) -> int | None:
        """Of the helper process; None where there is none."""
        return None if self._process is None else self._process.pid

    def reserve(self, name: str, amounts: Mapping[str, float]) -> None:
        """Take custom resources of this node, until :meth:`release`, also of Ray that is started anew, as far as it has them.

        Raises UserError where they are not left, HeadAway.
        """
        self._reserved[name] = {**amounts, self._joining.own: 0.001}
        try:
            self.call("reserve", name, self._reserved[name])
        except UserError:
            del self._reserved[name]
            raise

    def release(self, name: str) -> None:
        self._reserved.pop(name, None)
        with contextlib.suppress(HeadAway):
            self.call("release", name)

    def wait(self) -> None:
        """Return once the head answers. Raises UserError where it does not within START_S."""
        end = time.monotonic() + START_S
        while True:
            try:
                self.call("heard")
                return
            except HeadAway as error:
                if time.monotonic() > end:
                    self.close()
                    if self._joining.is_head:
                        raise UserError(f"--cluster head: it did not start within {START_S:g} s ({error})") from None
                    where = f"--cluster {self._joining.address}"
                    raise UserError(f"{where}: no cluster answers there ({error}); start one with --cluster head") from None
                time.sleep(0.5)

    def close(self) -> None:
        """End Ray on this machine."""
        self._thread.submit(self._end).result()

    def _started(self) -> Connection:
        if self._process is None or not self._process.is_alive() or self._pipe is None:
            self._end()
            if time.monotonic() < self._began + BACKOFF_S:
                raise HeadAway("Ray is started again in a moment")
            if not self._joining.is_head and not _listens(self._joining.address):
                raise HeadAway(f"nothing listens at {self._joining.address}")
            self._began, self._ready = time.monotonic(), False
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._joining), name="edgevlm-ray", daemon=False)
            self._process.start()
            theirs.close()
        if not self._ready:
            if not self._pipe.poll(0.5):
                if time.monotonic() > self._began + START_S:
                    self._end()
                raise HeadAway("Ray is starting")
            try:
                kind, why = self._pipe.recv()
            except (OSError, EOFError):
                kind, why = "away", "Ray could not be started"
            if kind != "ready":
                self._end()
                raise HeadAway(why)
            self._ready, self._heard = True, time.monotonic()
            for name, amounts in list(self._reserved.items()):
                with contextlib.suppress(UserError):
                    self._call("reserve", (name, amounts))
        return self._pipe

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(BACKOFF_S)
            if self._process.is_alive():
                self._process.terminate()
                self._process.join(BACKOFF_S)
                self._process.kill()
        self._process = self._pipe = None


def _serve(pipe: Connection, joining: Joining) -> None:
    """The helper process: start Ray, then answer calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    with open(os.devnull, "w") as nowhere:  # Ray says there what it pleases, and colours it
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": f"{AWAY_S:.0f}",  # after which it ends
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # it waits 30 s for its actors; cameras have moved by now
        **token_of(joining.secret),
    }
    if joining.redis is not None:
        os.environ |= {
            "RAY_REDIS_ADDRESS": joining.redis.rpartition("@")[2].removeprefix("redis://"),
            "RAY_external_storage_namespace": _token(f"redis {joining.secret}")[:16],  # others may use that Redis too
        }
    if joining.is_head and _listens(joining.address):  # another cluster's Ray would be joined
        pipe.send(("away", f"something else listens at {joining.address}; give another port: --cluster head:PORT"))
        return
    with _ray_of(joining) as running, contextlib.suppress(EOFError, OSError):
        try:
            head = _find_head(joining, running)
        except Exception as error:
            pipe.send(("away", " ".join(str(error).split())[:300] or type(error).__name__))
            return
        pipe.send(("ready", ""))
        reserved: dict[str, Any] = {}
        while True:
            method, arguments = pipe.recv()
            if running.poll() is not None:  # Ray has given this node up: its resources are gone
                return
            if method == "reserve":
                pipe.send(_reserve(reserved, *arguments))
            elif method == "release":
                pipe.send(_release(reserved, *arguments))
            else:
                pipe.send(_answer(head, method, arguments))


def token_of(key: str) -> dict[str, str]:
    """Variables by which Ray lets in who has the key."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token(f"cluster {key}")}


def _token(of: str) -> str:
    return hashlib.sha256(f"edgevlm {of}".encode()).hexdigest()


def _temporary(joining: Joining) -> Path:
    """A node's own folder for Ray's sockets, whose names are short: two that start at once in one folder take the same."""
    own = _token(f"{os.getuid()} {joining.address} {joining.ip} {joining.own}")[:8]
    return Path(tempfile.gettempdir()) / f"edgevlm-ray-{own}"


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), BACKOFF_S).close()
    except OSError:
        return False
    return True


def _answer(head: Any, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    import ray

    try:
        return "answer", ray.get(getattr(head, method).remote(*arguments), timeout=ANSWER_S)
    except UserError as error:  # Ray's error is one of the cause's kind too
        return "user", str(getattr(error, "cause", error))
    except Exception as error:
        return "away", type(error).__name__


def _reserve(reserved: dict[str, Any], name: str, amounts: Mapping[str, float]) -> tuple[str, str]:
    """A placement group takes resources, and no process; Ray gives them back when this process ends."""
    from ray.util.placement_group import placement_group

    _release(reserved, name)
    reserved[name] = placement_group([dict(amounts)])
    if reserved[name].wait(RESERVE_S):
        return "answer", ""
    _release(reserved, name)
    asked = ", ".join(f"{key} {amount:g}" for key, amount in amounts.items())
    return "user", f"{name}: Ray has not enough resources left on this node ({asked})"


def _release(reserved: dict[str, Any], name: str) -> tuple[str, str]:
    from ray.util.placement_group import remove_placement_group

    if name in reserved:
        remove_placement_group(reserved.pop(name))
    return "answer", ""


@contextlib.contextmanager
def _ray_of(joining: Joining) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes of this node, ended at the end of the block."""
    temporary = _temporary(joining)
    with contextlib.suppress(OSError):  # where a head before this one was; Ray takes the nodes beside it for that one
        (temporary / "ray_current_cluster").unlink()
    where = ["--head", f"--port={joining.address.rpartition(':')[2]}", "--include-dashboard=false"]
    if not joining.is_head:
        where = [f"--address={joining.address}"]
    if password := unquote((joining.redis or "").rpartition("@")[0].removeprefix("redis://:")):
        where.append(f"--redis-password={password}")  # Ray has no other way, and passes it on like this
    resources = "{" + ",".join(f'"{name}":{amount:g}' for name, amount in joining.resources.items()) + "}"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1",
        f"--object-store-memory={OBJECTS}", f"--node-ip-address={joining.ip}", f"--resources={resources}",
        f"--temp-dir={temporary}", *where,
    ]  # fmt: skip
    nothing = subprocess.DEVNULL
    ray = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, preexec_fn=_end_with_parent)
    try:
        yield ray
    finally:
        ray.terminate()
        try:
            ray.wait(2 * BACKOFF_S)
        except subprocess.TimeoutExpired:
            ray.kill()


def _find_head(joining: Joining, running: subprocess.Popen[bytes]) -> Any:
    """The head's actor, made where this node is the head's. Raises whatever Ray does."""
    import ray

    from edgevlm.apps.cluster.head import Head

    end = time.monotonic() + START_S
    while True:
        if running.poll() is not None:
            raise ConnectionError(f"`ray start` ended with {running.returncode}")
        try:
            if not _listens(joining.address):  # Ray would wait for it for AWAY_S
                raise ConnectionError(f"nothing listens at {joining.address}")
            ray.init(
                joining.address, namespace=NAMESPACE, _node_ip_address=joining.ip, log_to_driver=False, logging_level="fatal"
            )
            if not joining.is_head:
                return ray.get_actor("head")
            break
        except Exception:
            ray.shutdown()
            if time.monotonic() > end:
                raise
            time.sleep(1)
    options: dict[str, Any] = {
        "name": "head", "lifetime": "detached", "get_if_exists": True, "max_restarts": -1, "max_task_retries": 0, "num_cpus": 0,
        "resources": {"node:__internal_head__": 0.001},
    }  # fmt: skip
    return ray.remote(Head).options(**options).remote(joining.folder)


def _end_with_parent() -> None:
    """Have this process be told to end when its parent has, also when that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
