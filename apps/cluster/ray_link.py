"""Connect to a Ray cluster from a helper process, because Ray ends any process that loses its cluster."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgevlm.apps.cluster.head import Head, HeadAway
from edgevlm.errors import UserError
from edgevlm.runtime.helper_process import Helper, HelperEnded

NAMESPACE = "edgevlm"
PORT = 6379
OBJECTS = 80_000_000  # bytes of Ray's object store: the minimum, because no frames pass through it
HUNG_S = 60.0
ANSWER_S = 10.0  # longest wait for the head's answer, in seconds
START_S = 300.0
BACKOFF_S = 5.0
AWAY_S = 600.0  # seconds without an answer after which Ray is restarted
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Joining:
    """The settings with which a node joins a Ray cluster.

    ``address``: the head's HOST:PORT. ``ip``: this node's IP address. ``is_head``: whether this node starts the cluster.
    ``folder``: where the head keeps its state. ``secret``: the key that all nodes share.
    """

    address: str
    ip: str
    is_head: bool
    folder: str
    node: str
    secret: str


class RayLink:
    """Calls the head of a cluster through a helper process that runs Ray. A helper process that ends is replaced."""

    def __init__(self, joining: Joining) -> None:
        self._joining, self.helper = joining, Helper(wait_s=HUNG_S)
        self._lock = threading.Lock()
        self._began = self._heard = -BACKOFF_S

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the head and return its answer. Raises HeadAway, and any UserError that the head raises."""
        with self._lock:
            if self.helper.process is None or self.helper.process.poll() is not None:
                now = time.monotonic()
                if now < self._began + BACKOFF_S:
                    raise HeadAway("Ray is restarting")
                if not self._joining.is_head and not listens(self._joining.address):
                    raise HeadAway(f"nothing listens at {self._joining.address}")
                self._began = self._heard = now
            try:
                kind, answer = self.helper.call(f"{__name__}:answer", asdict(self._joining), method, arguments)
            except HelperEnded:
                raise HeadAway("the helper process that runs Ray has ended") from None
            is_lost = (
                not self._joining.is_head and time.monotonic() > self._heard + AWAY_S
            )  # restart Ray: the cluster may be new
            if kind == "ended" or (kind == "away" and is_lost):
                self.helper.close()
            if kind != "answer":
                raise HeadAway(answer)
            self._heard = time.monotonic()
            return answer

    def wait(self) -> None:
        """Wait until the head answers. Raises UserError after START_S seconds without an answer."""
        end = time.monotonic() + START_S
        while True:
            try:
                self.call("heard")
                return
            except HeadAway as error:
                if time.monotonic() > end:
                    self.close()
                    if self._joining.is_head:
                        raise UserError(f"--cluster head: did not start within {START_S:g} s ({error})") from None
                    where = f"--cluster {self._joining.address}"
                    raise UserError(f"{where}: no cluster answers there ({error}); start one with --cluster head") from None
                time.sleep(0.5)

    def close(self) -> None:
        with self._lock:
            self.helper.close()


_node: RayNode | None = None  # set in the helper process only


def answer(joining: dict[str, Any], method: str, arguments: list[Any]) -> tuple[str, Any]:
    """Call the head from the helper process. The first call starts Ray.

    Returns ``("answer", ANSWER)``, ``("away", WHY)`` if there is no answer yet, or ``("ended", WHY)`` if there will be none.
    Raises any UserError that the head raises.
    """
    global _node
    if _node is None:
        wanted = Joining(**joining)
        if wanted.is_head and listens(wanted.address):  # do not join another cluster's Ray
            return "ended", f"{wanted.address} is already in use; choose another port: --cluster head:PORT"
        _node = RayNode(wanted)
    return _node.answer(method, arguments)


class RayNode:
    """This node's Ray processes, which end with the helper process."""

    def __init__(self, joining: Joining) -> None:
        self._joining, self._problem = joining, "Ray is starting"
        self._head: Any = None
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        with open(os.devnull, "w") as nowhere:  # hide Ray's coloured messages
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        os.environ |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{AWAY_S:.0f}",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # do not wait 30 s for actors: the cameras have moved by now
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _token(f"cluster {joining.secret}"),
        }
        self._ray = subprocess.Popen(
            _command(joining), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=_end_with_parent
        )
        atexit.register(self._end)
        threading.Thread(target=self._find, name="edgevlm-find", daemon=True).start()

    def answer(self, method: str, arguments: list[Any]) -> tuple[str, Any]:
        if self._ray.poll() is not None:
            return "ended", f"ray start exited with status {self._ray.returncode}"
        if self._head is None:
            return "away", self._problem
        import ray

        try:
            return "answer", ray.get(self._head.call.remote(method, *arguments), timeout=ANSWER_S)
        except UserError as error:  # Ray's copy of the head's error is also a UserError
            raise UserError(str(getattr(error, "cause", error))) from None
        except Exception as error:
            return "away", type(error).__name__

    def _find(self) -> None:
        import ray

        options: dict[str, Any] = {
            "name": "head", "lifetime": "detached", "get_if_exists": True, "max_restarts": -1, "max_task_retries": 0,
            "num_cpus": 0, "resources": {"node:__internal_head__": 0.001},
        }  # fmt: skip
        at = {"namespace": NAMESPACE, "_node_ip_address": self._joining.ip}
        while self._head is None:
            try:
                if not listens(self._joining.address):  # while nothing listens, ray.init would wait AWAY_S
                    raise ConnectionError(f"nothing listens at {self._joining.address}")
                ray.init(self._joining.address, log_to_driver=False, logging_level="fatal", **at)
                if self._joining.is_head:
                    self._head = ray.remote(Head).options(**options).remote(self._joining.folder)
                else:
                    self._head = ray.get_actor("head")
            except Exception as error:
                ray.shutdown()
                self._problem = " ".join(str(error).split())[:300] or type(error).__name__
                time.sleep(1)

    def _end(self) -> None:
        self._ray.terminate()
        try:
            self._ray.wait(2 * BACKOFF_S)
        except subprocess.TimeoutExpired:
            self._ray.kill()


def _token(text: str) -> str:
    return hashlib.sha256(f"edgevlm {text}".encode()).hexdigest()


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), BACKOFF_S).close()
    except OSError:
        return False
    return True


def _command(joining: Joining) -> list[str]:
    own = _token(f"{os.getuid()} {joining.address} {joining.ip} {joining.node}")[:8]
    temporary = Path(tempfile.gettempdir()) / f"edgevlm-ray-{own}"
    with suppress(OSError):  # other nodes here would connect to the earlier head that is stored in this file
        (temporary / "ray_current_cluster").unlink()
    where = [f"--address={joining.address}"]
    if joining.is_head:
        where = ["--head", f"--port={joining.address.rpartition(':')[2]}", "--include-dashboard=false"]
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1",
        f"--object-store-memory={OBJECTS}", f"--node-ip-address={joining.ip}", f"--temp-dir={temporary}", *where,
    ]  # fmt: skip


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
