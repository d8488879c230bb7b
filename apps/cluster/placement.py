"""Assign cameras to nodes by the memory and speed that ``edgevlm plan`` predicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgevlm.apps.credentials import mask_credentials

MOST = 1 + 1e-9  # limit for a node's memory and time; rounded fractions may add up to slightly more than 1


@dataclass(frozen=True, slots=True)
class Need:
    """A model's predicted memory and speed on a node. ``fps``: frames a second for all its cameras, or 0 if it cannot run."""

    weights_bytes: int = 0  # a node's cameras share the weights of a model
    camera_bytes: int = 0
    fps: float = 0.0


@dataclass
class Node:
    """A machine of the cluster. ``seen``: when the node's last request came. ``leaving``: whether it will leave the cluster."""

    name: str
    memory_bytes: int
    needs: dict[str, Need] = field(default_factory=dict)  # the needs of each model that the node has planned
    url: str = ""
    seen: float = 0.0
    leaving: bool = False


@dataclass
class Camera:
    """A camera in the cluster, and the node that watches it.

    ``only``: the node that the camera is plugged into, if any; no other node can watch it. ``moves_to``: the node that the
    camera moves to once ``node`` has written a last snapshot. ``epoch``: how many times the camera was placed, so that late
    writes from earlier nodes can be ignored. ``begins``: the epoch in which the memory was last emptied; older epochs are not
    read. ``problem``: the reason why no node watches the camera. ``switched``: settings changed since the camera was added.
    """

    name: str
    model: str
    fps: float
    only: str | None = None
    node: str | None = None
    moves_to: str | None = None
    epoch: int = 0
    begins: int = 0
    problem: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    switched: dict[str, Any] = field(default_factory=dict)
    by_client: bool = False
    paused: bool = False
    paused_watches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Load:
    """The memory that a node's cameras use, and the fraction of the node's time that they take."""

    node: Node
    taken: int = 0
    time: float = 0.0
    cameras: Counter[str] = field(default_factory=Counter)  # number of cameras by model

    def need(self, camera: Camera) -> Need:
        return self.node.needs.get(camera.model, Need())

    def runs(self, camera: Camera) -> bool:
        """Return whether the node could watch the camera if it watched no other cameras."""
        return camera.only in (None, self.node.name) and self.need(camera).fps > 0

    def bytes_of(self, camera: Camera) -> int:
        """Return the bytes that one more camera needs, with the model's weights if it is the first camera of the model."""
        need = self.need(camera)
        return need.camera_bytes + (0 if self.cameras[camera.model] else need.weights_bytes)

    def add(self, camera: Camera) -> None:
        self.taken += self.bytes_of(camera)
        self.time += camera.fps / self.need(camera).fps
        self.cameras[camera.model] += 1

    def remove(self, camera: Camera) -> None:
        self.cameras[camera.model] -= 1
        self.time -= camera.fps / self.need(camera).fps
        self.taken -= self.bytes_of(camera)

    def fullness(self) -> float:
        """Return the fraction of memory or time in use, whichever is larger: 0 to 1."""
        return max(self.taken / self.node.memory_bytes, self.time)

    def with_one_more(self, camera: Camera) -> float:
        """Return :meth:`fullness` after adding a camera, or infinity if the camera does not fit."""
        if not self.runs(camera):
            return math.inf
        taken, time = self.taken + self.bytes_of(camera), self.time + camera.fps / self.need(camera).fps
        full = max(taken / self.node.memory_bytes, time)
        return full if full <= MOST else math.inf


def place(cameras: Iterable[Camera], nodes: Iterable[Node], held: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Assign each camera to a node. Return each placed camera's node, and the reason for each camera that fits nowhere.

    A camera stays on its current node if that node can run it. Other cameras go to the node with the most room. Larger cameras
    are placed first. A node must keep up with the frames of all its cameras. ``held``: the current node of each camera.
    """
    loads, placed, refused, waiting = {node.name: Load(node) for node in nodes}, {}, {}, []
    for camera in cameras:
        at = loads.get(held.get(camera.name, ""))
        if at is not None and at.runs(camera):
            at.add(camera)
            placed[camera.name] = at.node.name
        else:
            waiting.append(camera)
    for camera in sorted(waiting, key=lambda camera: (-_size(loads.values(), camera), camera.name)):
        best = min(loads.values(), key=lambda load: load.with_one_more(camera), default=None)
        if best is not None and best.with_one_more(camera) < math.inf:
            best.add(camera)
            placed[camera.name] = best.node.name
        else:
            refused[camera.name] = why_not(loads.values(), camera)
    return placed, refused


def rebalance(cameras: Iterable[Camera], nodes: Iterable[Node], placed: Mapping[str, str], gain: float = 0.2) -> dict[str, str]:
    """Choose cameras that should move from full nodes to emptier nodes. Return each chosen camera's new node.

    A move costs a few seconds of the camera's stream. A camera therefore moves only if its new node's fullness after the
    move is at least ``gain`` below its old node's fullness before the move.
    """
    loads = {node.name: Load(node) for node in nodes}
    watched: dict[str, list[Camera]] = {name: [] for name in loads}
    for camera in sorted(cameras, key=lambda camera: camera.name, reverse=True):
        at = loads.get(placed.get(camera.name, ""))
        if at is not None and at.runs(camera):
            at.add(camera)
            watched[at.node.name].append(camera)
    moves: dict[str, str] = {}
    unsettled = list(loads.values())
    while unsettled:
        fullest = max(unsettled, key=Load.fullness)
        goal = fullest.fullness() - gain
        if goal < min(map(Load.fullness, loads.values())):  # no move from the fullest node can gain enough
            break
        here, others = watched[fullest.node.name], [load for load in loads.values() if load is not fullest]
        kinds = {(camera.model, camera.fps, camera.only): camera for camera in here if camera.name not in moves}
        for camera in sorted(kinds.values(), key=lambda camera: (_size(loads.values(), camera), camera.name)):
            best = min(others, key=lambda load: load.with_one_more(camera), default=None)
            if best is not None and best.with_one_more(camera) <= goal:
                fullest.remove(camera)
                best.add(camera)
                here.remove(camera)
                watched[best.node.name].append(camera)
                moves[camera.name] = best.node.name
                break
        else:
            unsettled.remove(fullest)
    return moves


def why_not(loads: Collection[Load], camera: Camera) -> str:
    able = [load for load in loads if load.runs(camera)]
    if not any(camera.only in (None, load.node.name) for load in loads):
        return "no node is available" if camera.only is None else f"its node {camera.only} is not available"
    if not able:
        return f"no available node can run {mask_credentials(camera.model)}"
    left = {load.node.name: load.node.memory_bytes - load.taken for load in able}
    fps_left = {load.node.name: load.need(camera).fps * (1 - load.time) for load in able}
    roomy = max(able, key=lambda load: left[load.node.name] - load.bytes_of(camera))
    idle = max(fps_left, key=lambda name: fps_left[name])
    return (
        f"it needs {roomy.bytes_of(camera) / 1e6:,.0f} MB and {camera.fps:g} frames a second, but {roomy.node.name} has "
        f"{max(0, left[roomy.node.name]) / 1e6:,.0f} MB left and {idle} {max(0.0, fps_left[idle]):.1f} frames a second"
    )


def _size(loads: Iterable[Load], camera: Camera) -> float:
    return min((load.with_one_more(camera) - load.fullness() for load in loads), default=0.0)
