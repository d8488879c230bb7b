"""Which node watches which camera: a pure function of what ``edgevlm plan`` predicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgevlm.apps.credentials import mask_credentials

MOST = 1 + 1e-9  # of a node's time; rounded fractions may add up to a little more than one


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes of a kind of node. fps: frames a second of all its cameras together; 0 where it does not run."""

    weights_bytes: int  # once a node
    camera_bytes: int
    fps: float


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera to be watched. node: the only one that can, such as that with the USB camera; None for any."""

    name: str
    model: str
    fps: float
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. kind: the first key of ``needs``. memory_bytes: for edgevlm."""

    name: str
    kind: str
    memory_bytes: int


Needs = Mapping[tuple[str, str], Need]  # by kind of node and model
NOTHING = Need(0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """placed: node by camera. refused: why, by camera."""

    placed: dict[str, str]
    refused: dict[str, str]


@dataclass(slots=True)
class Load:
    """What the cameras placed on a node take of its memory, and the fraction of its time."""

    node: Node
    needs: Needs
    taken: int = 0
    time: float = 0.0
    cameras: Counter[str] = field(default_factory=Counter)  # by model

    def need(self, model: str) -> Need:
        return self.needs.get((self.node.kind, model), NOTHING)

    def bytes_of(self, camera: Camera) -> int:
        """Memory that one more camera takes, its model's weights included where it is the first."""
        need = self.need(camera.model)
        return need.camera_bytes + (0 if self.cameras[camera.model] else need.weights_bytes)

    def add(self, camera: Camera) -> None:
        self.taken += self.bytes_of(camera)
        self.time += camera.fps / self.need(camera.model).fps
        self.cameras[camera.model] += 1

    def remove(self, camera: Camera) -> None:
        self.cameras[camera.model] -= 1
        self.time -= camera.fps / self.need(camera.model).fps
        self.taken -= self.bytes_of(camera)

    def runs(self, camera: Camera) -> bool:
        """Whether the camera could be watched here, were nothing else."""
        return camera.node in (None, self.node.name) and self.need(camera.model).fps > 0

    @property
    def fits(self) -> bool:
        return self.taken <= self.node.memory_bytes and self.time <= MOST

    @property
    def fullness(self) -> float:
        """Memory or time, whichever is fuller: 0 to 1."""
        return max(self.taken / self.node.memory_bytes, self.time)

    def with_one_more(self, camera: Camera) -> float:
        """The fullness with one more camera; infinity where it does not fit."""
        if not self.runs(camera):
            return math.inf
        taken, time = self.taken + self.bytes_of(camera), self.time + camera.fps / self.need(camera.model).fps
        fits = taken <= self.node.memory_bytes and time <= MOST
        return max(taken / self.node.memory_bytes, time) if fits else math.inf


def place(cameras: Iterable[Camera], nodes: Sequence[Node], needs: Needs, held: Mapping[str, str] | None = None) -> Placement:
    """Give each camera a node. Those of ``held`` stay where they are if they fit; the others go where most is left, the
    largest first, and what fits nowhere is refused.

    A node holds a model's weights once, a memory for each camera, and has as many frames a second as its cameras give.
    """
    held, loads = held or {}, {node.name: Load(node, needs) for node in nodes}
    waiting, staying = [], []
    for camera in cameras:
        at = loads.get(held.get(camera.name, ""))
        if at is None or not at.runs(camera):
            waiting.append(camera)
        else:
            at.add(camera)
            staying.append((camera, at))
    placed = {camera.name: at.node.name for camera, at in staying}
    for camera, at in sorted(staying, key=lambda each: each[0].name, reverse=True):
        if not at.fits:  # what the node has became less
            at.remove(camera)
            del placed[camera.name]
            waiting.append(camera)
    refused = {}
    for camera in sorted(waiting, key=lambda camera: (-_size(loads.values(), camera), camera.name)):
        best = min(loads.values(), key=lambda load: load.with_one_more(camera), default=None)
        if best is not None and best.with_one_more(camera) < math.inf:
            best.add(camera)
            placed[camera.name] = best.node.name
        else:
            refused[camera.name] = why_not(loads, camera)
    return Placement(placed, refused)


def rebalance(
    cameras: Iterable[Camera], nodes: Sequence[Node], needs: Needs, placed: Mapping[str, str], gain: float = 0.2
) -> dict[str, str]:
    """Moves, node by camera, from the fullest node to where a camera leaves both less full than that one is now by ``gain``.

    A move costs a camera the seconds that its memory takes to travel, so few are made: none between nodes about as full.
    """
    loads: dict[str, Load] = {node.name: Load(node, needs) for node in nodes}
    watched: dict[str, list[Camera]] = {name: [] for name in loads}
    for camera in cameras:
        if (at := loads.get(placed.get(camera.name, ""))) is not None:
            at.add(camera)
            watched[at.node.name].append(camera)
    moves: dict[str, str] = {}
    unsettled = list(loads.values())
    while unsettled:
        fullest = max(unsettled, key=lambda load: load.fullness)
        goal = fullest.fullness - gain
        if goal < min(load.fullness for load in loads.values()):  # nor has a less full one anywhere to move to
            break
        by_name = sorted(watched[fullest.node.name], key=lambda camera: camera.name, reverse=True)
        kinds = {(camera.model, camera.fps, camera.node): camera for camera in by_name if camera.name not in moves}
        others = [load for load in loads.values() if load is not fullest]
        for camera in sorted(kinds.values(), key=lambda camera: (_size(loads.values(), camera), camera.name)):
            best = min(others, key=lambda load: load.with_one_more(camera), default=None)
            if best is not None and best.with_one_more(camera) <= goal:
                fullest.remove(camera)
                best.add(camera)
                watched[fullest.node.name].remove(camera)
                watched[best.node.name].append(camera)
                moves[camera.name] = best.node.name
                break
        else:
            unsettled.remove(fullest)
    return moves


def why_not(loads: Mapping[str, Load], camera: Camera) -> str:
    """Why a camera fits nowhere, for a person."""
    nodes = [load for name, load in loads.items() if camera.node in (None, name)]
    if not nodes:
        return "there is no node" if camera.node is None else f"its node {camera.node} is not there"
    able = [load for load in nodes if load.runs(camera)]
    if not able:
        return f"{mask_credentials(camera.model)} runs on no node that is there"

    def bytes_left(load: Load) -> int:
        return load.node.memory_bytes - load.taken

    def fps_left(load: Load) -> float:
        return load.need(camera.model).fps * (1 - load.time)

    roomy, idle = max(able, key=lambda load: bytes_left(load) - load.bytes_of(camera)), max(able, key=fps_left)
    return (
        f"it takes {roomy.bytes_of(camera) / 1e6:,.0f} MB and {camera.fps:g} frames a second; {roomy.node.name} has "
        f"{max(0, bytes_left(roomy)) / 1e6:,.0f} MB left, {idle.node.name} {max(0.0, fps_left(idle)):.1f} frames a second"
    )


def _size(loads: Iterable[Load], camera: Camera) -> float:
    """The fraction that a camera takes of the node it would fill least."""
    return min((load.with_one_more(camera) - load.fullness for load in loads), default=0.0)
