"""Which node watches which camera: a pure function of what ``edgevlm plan`` predicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgevlm.apps.credentials import mask_credentials

MOST = 1 + 1e-9  # of a node's time; fractions that are added come to a little more than one


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes of a kind of node. fps: frames a second of all its cameras together; 0 where it does not run."""

    weights_bytes: int  # once a node
    camera_bytes: int
    fps: float


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera to be watched. node: the only one that can, such as that a USB camera is plugged into; None for any."""

    name: str
    model: str
    fps: float
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. kind: a device profile's name, or whatever ``needs`` is told by. memory_bytes: for edgevlm."""

    name: str
    kind: str
    memory_bytes: int


Needs = Mapping[tuple[str, str], Need]  # by kind of node and model


@dataclass(frozen=True, slots=True)
class Placement:
    """placed: node by camera. refused: why, by camera."""

    placed: dict[str, str]
    refused: dict[str, str]


class Nodes:
    """What is taken of each node while cameras are placed. Loads are fractions of a node's time."""

    def __init__(self, nodes: Sequence[Node], needs: Needs) -> None:
        self.nodes, self.index = nodes, {node.name: place for place, node in enumerate(nodes)}
        self.memory = np.array([node.memory_bytes for node in nodes], np.int64)
        self.taken, self.load = np.zeros(len(nodes), np.int64), np.zeros(len(nodes))
        self._needs = needs
        self._cameras: dict[str, np.ndarray] = {}  # of each model, by node
        self._of: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def hold(self, cameras: Iterable[tuple[Camera, int]]) -> None:
        """Many come at once, each to the node ``at`` its number, which held nothing before."""
        by_model: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for camera, at in cameras:
            by_model[camera.model].append((camera.fps, at))
        for model, held in by_model.items():
            weights, each, rates = self._need(model)
            fps, places = np.array([fps for fps, _ in held]), np.array([at for _, at in held])
            counts = np.bincount(places, minlength=len(self.nodes))
            self._cameras[model] += counts
            self.taken += counts * each + weights * (counts > 0)
            self.load += np.bincount(places, fps / rates[places], len(self.nodes))

    def change(self, camera: Camera, at: int, count: int) -> None:
        """A camera comes to a node (1) or leaves it (-1)."""
        weights, each, rates = self._need(camera.model)
        cameras = self._cameras[camera.model]
        self.taken[at] += count * each[at] + (count * weights[at] if cameras[at] == (count < 0) else 0)
        cameras[at] += count
        self.load[at] += count * camera.fps / rates[at]

    def could(self, camera: Camera, at: int) -> bool:
        """Whether a node alone with this camera would do."""
        return camera.node in (None, self.nodes[at].name) and self._need(camera.model)[2][at] > 0

    def fits(self, at: int) -> bool:
        """Whether a node has no more than it can take."""
        return bool(self.taken[at] <= self.memory[at] and self.load[at] <= MOST)

    def with_one_more(self, camera: Camera) -> np.ndarray:
        """``[N]``: how full each node would be, in memory or time, whichever is more; infinity where it does not fit."""
        weights, each, rates = self._need(camera.model)
        bytes_taken = self.taken + each + weights * (self._cameras[camera.model] == 0)
        load = self.load + np.divide(camera.fps, rates, out=np.full(len(rates), np.inf), where=rates > 0)
        full: np.ndarray = np.maximum(bytes_taken / self.memory, load)
        full[(bytes_taken > self.memory) | (load > MOST)] = np.inf
        if camera.node is not None:
            full[[node.name != camera.node for node in self.nodes]] = np.inf
        return full

    def fullness(self) -> np.ndarray:
        """``[N]``, 0 to 1."""
        full: np.ndarray = np.maximum(self.taken / self.memory, self.load)
        return full

    def why_not(self, camera: Camera) -> str:
        """Why a camera fits nowhere, for a person."""
        nodes = [(place, node) for place, node in enumerate(self.nodes) if camera.node in (None, node.name)]
        if not nodes:
            return "there is no node" if camera.node is None else f"its node {camera.node} is not there"
        weights, each, rates = self._need(camera.model)
        able = [place for place, _ in nodes if rates[place] > 0]
        if not able:
            return f"{mask_credentials(camera.model)} runs on no node that is there"
        place = max(able, key=lambda place: rates[place] * (1 - self.load[place]))
        asked = each + weights * (self._cameras[camera.model] == 0)
        emptiest = max(able, key=lambda place: self.memory[place] - self.taken[place] - asked[place])
        return (
            f"it takes {asked[emptiest] / 1e6:,.0f} MB and {camera.fps:g} frames a second; {self.nodes[emptiest].name} has "
            f"{max(0, self.memory[emptiest] - self.taken[emptiest]) / 1e6:,.0f} MB left, {self.nodes[place].name} "
            f"{max(0.0, rates[place] * (1 - self.load[place])):.1f} frames a second"
        )

    def _need(self, model: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``[N]`` each: bytes of weights and of a camera, frames a second."""
        if model not in self._of:
            nothing = Need(0, 0, 0.0)
            needs = [self._needs.get((node.kind, model), nothing) for node in self.nodes]
            self._of[model] = (
                np.array([need.weights_bytes for need in needs], np.int64),
                np.array([need.camera_bytes for need in needs], np.int64),
                np.array([need.fps for need in needs], float),
            )
            self._cameras[model] = np.zeros(len(self.nodes), np.int64)
        return self._of[model]


def place(cameras: Iterable[Camera], nodes: Sequence[Node], needs: Needs, held: Mapping[str, str] | None = None) -> Placement:
    """Give each camera a node. Those of ``held`` stay where they are if they fit; the others go where most is left, the
    largest first, and what fits nowhere is refused.

    A node holds a model's weights once, a memory for each camera, and has as many frames a second as its cameras give.
    """
    held, state = held or {}, Nodes(nodes, needs)
    waiting, staying = [], []
    for camera in cameras:
        at = state.index.get(held.get(camera.name, ""))
        if at is None or not state.could(camera, at):
            waiting.append(camera)
        else:
            staying.append((camera, at))
    state.hold(staying)
    placed = {camera.name: nodes[at].name for camera, at in staying}
    unfit = {at for at in range(len(nodes)) if not state.fits(at)}  # where what a node has became less
    for camera, at in sorted(((camera, at) for camera, at in staying if at in unfit), key=lambda each: each[0].name)[::-1]:
        if not state.fits(at):
            state.change(camera, at, -1)
            del placed[camera.name]
            waiting.append(camera)
    refused = {}
    for camera in sorted(waiting, key=lambda camera: (-_size(state, camera), camera.name)):
        full = state.with_one_more(camera)
        best = int(full.argmin()) if len(full) else 0
        if len(full) and np.isfinite(full[best]):
            state.change(camera, best, 1)
            placed[camera.name] = state.nodes[best].name
        else:
            refused[camera.name] = state.why_not(camera)
    return Placement(placed, refused)


def rebalance(
    cameras: Iterable[Camera], nodes: Sequence[Node], needs: Needs, placed: Mapping[str, str], gain: float = 0.2
) -> dict[str, str]:
    """Moves, node by camera, from the fullest node to where a camera leaves both less full than that one is now by ``gain``.

    A move costs a camera the seconds that its memory takes to travel, so few are made: none between nodes about as full.
    """
    state, at = Nodes(nodes, needs), dict(placed)
    of: dict[str, list[Camera]] = defaultdict(list)
    staying = [(camera, state.index[node]) for camera in cameras if (node := at.get(camera.name, "")) in state.index]
    state.hold(staying)
    for camera, spot in staying:
        of[nodes[spot].name].append(camera)
    moves: dict[str, str] = {}
    settled = np.zeros(len(nodes), bool)
    while not settled.all():
        fullness = state.fullness()
        full = np.where(settled, -1.0, fullness)
        fullest = int(full.argmax())
        if full[fullest] - gain < fullness.min():  # nor has a less full one anywhere to move to
            break
        by_name = sorted(of[nodes[fullest].name], key=lambda camera: camera.name, reverse=True)
        first = {(camera.model, camera.fps, camera.node): camera for camera in by_name if camera.name not in moves}
        for camera in sorted(first.values(), key=lambda camera: (_size(state, camera), camera.name)):
            after = state.with_one_more(camera)
            after[fullest] = np.inf
            best = int(after.argmin())
            if after[best] <= full[fullest] - gain:
                state.change(camera, fullest, -1)
                state.change(camera, best, 1)
                of[nodes[fullest].name].remove(camera)
                of[nodes[best].name].append(camera)
                moves[camera.name] = nodes[best].name
                break
        else:
            settled[fullest] = True
    return moves


def _size(nodes: Nodes, camera: Camera) -> float:
    """The fraction that a camera takes of the node it would fill least."""
    full = nodes.with_one_more(camera) - nodes.fullness()
    return float(full.min()) if len(full) else 0.0
