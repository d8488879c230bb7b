"""Make a server a node of a cluster, for ``edgevlm serve --cluster``."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
import socket
from typing import Any

from fastapi import FastAPI

from edgevlm.apps.cluster.agent import NodeAgent
from edgevlm.apps.cluster.ray_link import PORT, Joining, RayLink, listens
from edgevlm.apps.cluster.routes import ClusterRoutes
from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.planning.this_machine import this_machine
from edgevlm.apps.serve.service import Service
from edgevlm.errors import UserError
from edgevlm.packages import install
from edgevlm.progress import Notify

NAME = re.compile(r"[^a-z0-9_-]+")


class ClusterMember:
    """Connects a service to a cluster."""

    def __init__(self, service: Service, link: RayLink, agent: NodeAgent) -> None:
        self._service, self._link, self._agent = service, link, agent

    def open(self) -> None:
        """Join the cluster. Raises UserError if no cluster answers."""
        self._link.wait()
        if self._service.config.sinks:
            _ = self._service.delivery
        self._agent.start()

    def routes(self, app: FastAPI) -> Any:
        return ClusterRoutes(app, self._service, self._agent)

    def close(self) -> None:
        """Move the node's cameras to other nodes, then leave the cluster."""
        self._agent.close()
        self._link.close()


def join(service: Service, port: int, notify: Notify) -> ClusterMember:
    """Prepare a service to join a cluster. Raises UserError for settings that do not work in a cluster."""
    config, wanted = service.config, service.config.cluster
    if service.key is None:
        raise UserError("--cluster accepts connections from other machines; give all nodes the same key with --key-file")
    if wanted.snapshots is None:
        raise UserError(
            "--cluster requires a folder or an address for snapshots that all nodes share; add --set cluster.snapshots=DIR"
        )
    if config.snapshots is not None:
        raise UserError("--cluster: snapshots must go to storage that all nodes share; set only cluster.snapshots")
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"--cluster needs the package ray, which is not installed: {install('cluster')}")
    host, _, ray_port = (wanted.join or "").partition(":")
    is_head = host == "head"
    ip = wanted.address or address_of(config.server.host, "" if is_head else host)
    address = f"{ip if is_head else host}:{ray_port or PORT}"
    if not is_head and not listens(address):
        raise UserError(f"--cluster {address}: no cluster answers there; start one with --cluster head")
    name = wanted.node or NAME.sub("-", socket.gethostname().lower()).strip("-_")[:64] or "node"
    device = this_machine()
    memory = int(wanted.memory * 1e6 if wanted.memory is not None else device.usable_bytes - device["system_mib"] * 2**20)
    shared, shown = Shared(wanted.snapshots), f"[{ip}]" if ":" in ip else ip
    link = RayLink(Joining(address, ip, is_head, wanted.snapshots, name, service.key))
    agent = NodeAgent(service, link.call, name, f"http://{shown}:{port}", shared, memory, notify)
    return ClusterMember(service, link, agent)


def address_of(host: str, other: str) -> str:
    """Return this machine's IP address: ``host``, or the address from which this machine reaches ``other``."""
    try:
        found = ipaddress.ip_address(host)
        if not found.is_unspecified:
            return str(found)
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other or "192.0.2.1", 9))  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            raise UserError(f"--cluster: cannot find this machine's address ({error.strerror}); set cluster.address") from None
