"""Decide which node of a cluster watches which camera."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from edgevlm import __version__
from edgevlm.apps.cluster.placement import Camera, Need, Node, place, rebalance
from edgevlm.errors import UserError, nearest

ASK_S = 2.0  # seconds between a node's requests
LEASE_S = 15.0
GRACE_S = 5.0  # seconds from a lease's end until the head moves the cameras: clocks differ, and calls take time
Fields = dict[str, Any]


@dataclass(slots=True)
class ClusterState:
    """The state that a cluster's head saves in a file.

    ``notes``: the requests to forget that some nodes or cameras have not carried out yet. ``removed``: the last epochs of
    removed cameras, so that a new camera of the same name gets a later epoch. ``instances``: the id of each node's process.
    ``nodes_forgot``, ``cameras_forgot``: the number of the last request to forget that each node and each camera completed.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    cameras: dict[str, Camera] = field(default_factory=dict)
    removed: dict[str, tuple[int, int]] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    watches: dict[str, Fields] = field(default_factory=dict)
    notes: list[Fields] = field(default_factory=list)
    number: int = 0
    nodes_forgot: dict[str, int] = field(default_factory=dict)
    cameras_forgot: dict[str, int] = field(default_factory=dict)
    removed_nodes: list[str] = field(default_factory=list)


class Director:
    """Places cameras on nodes. Uses no clock, network or disk, so tests can simulate a cluster exactly.

    Every few seconds each node asks which cameras it must watch, and may then watch them for LEASE_S seconds.

    A camera moves to its new node after the old node has closed the camera. A node that sends no request for LEASE_S + GRACE_S
    seconds is lost, and its cameras move to other nodes. ``save`` stores the state after each change, before any node sees the
    change. While ``save`` raises OSError, nodes keep the last saved state and no camera moves. Public methods take and return
    JSON values.
    """

    def __init__(
        self, state: ClusterState | None = None, save: Callable[[ClusterState], object] = lambda state: None, now: float = 0.0
    ) -> None:
        """Continue from a saved state, as if each of its nodes had just sent a request. ``now``: the time in seconds."""
        self.state, self._save, self._id, self._saves = state or ClusterState(), save, uuid4().hex, 0
        self._is_changed, self._save_at = False, -math.inf  # the time at which a failed save is retried
        for node in self.state.nodes.values():
            node.seen = now
        self._tell()

    def view(self, *, now: float = 0.0) -> Fields:
        """Return the nodes, the cameras with their nodes, and the rest of the state that all nodes share."""
        state = self.state
        return {
            "nodes": {name: {"url": node.url, "leaving": node.leaving} for name, node in state.nodes.items()},
            "cameras": {name: dict(vars(camera)) for name, camera in state.cameras.items()},
            "removed": {camera: begins for camera, (_, begins) in state.removed.items()},
            "nodes_forgot": dict(state.nodes_forgot),
            "cameras_forgot": dict(state.cameras_forgot),
            "watches": dict(state.watches),
            "notes": state.notes,
        }

    def join(
        self,
        name: str,
        instance: str,
        about: Fields,
        cameras: Mapping[str, Fields],
        watches: Mapping[str, Fields],
        version: str,
        *,
        now: float,
    ) -> list[str]:
        """Add a node with its configured cameras and watches. Return a line for each camera or watch that is refused.

        ``about``: the ``memory_bytes`` and ``url`` of a :class:`Node`. ``cameras``: the fields of each camera, as for
        :meth:`add`. Unplaced cameras, and some cameras of full nodes, move to the new node. Raises UserError while another
        process with the same node name may be watching. Raises UserError for a removed node's name and for a different minor
        version of edgevlm.
        """
        if minor(version) != minor(__version__):
            raise UserError(
                f"node {name} runs edgevlm {version} but the head runs {__version__}: all nodes must run "
                f"{minor(__version__)}.x; install edgevlm=={__version__} here, or stop all nodes and upgrade them"
            )
        self.tick(now)
        state, known = self.state, self.state.nodes.get(name)
        is_back = state.instances.get(name) == instance  # cameras that were removed stay removed until the node restarts
        if known is not None and not is_back:
            left = max(1.0, known.seen + LEASE_S + GRACE_S - now)
            raise UserError(f"node {name} already exists; set another cluster.node or, if it was killed, wait {left:.0f} s")
        if name in state.removed_nodes:
            raise UserError(
                f"node {name} was removed from the cluster; set another cluster.node and, on the same machine, empty --state, "
                "which may hold data that should be forgotten"
            )
        refused = []
        for camera, given in cameras.items():
            if camera not in state.cameras and not (is_back and camera in state.removed):
                self._add(camera, given)
            elif camera in state.cameras and state.cameras[camera].settings != given["settings"]:
                refused.append(f"{camera}: the cluster keeps other settings for this camera; remove it first to change them")
        for watch, fields in {} if is_back else watches.items():
            if state.watches.setdefault(watch, fields) != fields:
                refused.append(f"watch {watch}: the cluster keeps a different watch with this name; rename this one")
        state.instances[name] = instance
        state.nodes[name] = Node(name, needs={} if known is None else known.needs, seen=now, **about)
        state.nodes_forgot.setdefault(name, 0)
        self._spread()
        return refused

    def ask(
        self,
        name: str,
        instance: str,
        open: Collection[str],
        needs: Mapping[str, tuple[int, int, float]],
        forgot: int = 0,
        cameras_forgot: Mapping[str, int] | None = None,
        mark: str | None = None,
        *,
        now: float,
    ) -> Fields:
        """Return the cameras that a node must watch until LEASE_S seconds after its request.

        ``open``: the cameras that the node has open. ``needs``: the fields of a :class:`Need` for each model. ``forgot``: the
        number of the last deletion request that was completed in the node's files. ``cameras_forgot``: the number of the last
        request that was completed in each camera's memory. ``mark``: the version of the state that the node has; if this
        version is the newest, the reply's ``view`` is None. Raises UserError if the node must join again.
        """
        if not self._is_member(name, instance):
            raise UserError(f"node {name} is no longer in the cluster; joining again")
        state, node = self.state, self.state.nodes[name]
        node.seen = now
        known = {**node.needs, **{model: Need(*need) for model, need in needs.items()}}
        if known != node.needs:
            node.needs = known
            self._spread()
        saved = self.told["cameras"]
        for each in [each for each in state.cameras.values() if each.node == name]:
            if each.moves_to and each.name not in open and saved.get(each.name, {}).get("moves_to"):
                self._give(each, each.moves_to)
        if self._is_changed:  # a camera has left, so this node has room
            self._place()
        self.tick(now)
        saved = self.told["cameras"]  # read again, because placing and saving may have changed the cameras
        mine = [(each.name, saved.get(each.name)) for each in state.cameras.values() if each.node == name]
        followed = {each: last for each, last in (cameras_forgot or {}).items() if last > state.cameras_forgot.get(each, 0)}
        if followed or forgot > state.nodes_forgot.get(name, 0):
            state.nodes_forgot[name] = max(forgot, state.nodes_forgot.get(name, 0))
            state.cameras_forgot |= followed
            self._end_notes()
        newest = f"{self._id} {self._saves}"
        return {
            "orders": {each: row["epoch"] for each, row in mine if row and row["node"] == name and row["moves_to"] is None},
            "unknown": sorted(self._models - node.needs.keys()),
            "mark": newest,
            "view": None if mark == newest else self.told,
        }

    def tick(self, now: float) -> None:
        """Move lost nodes' cameras to other nodes, and retry a failed save."""
        lost = [name for name, node in self.state.nodes.items() if now - node.seen > LEASE_S + GRACE_S]
        for name in lost:
            del self.state.nodes[name]
        if lost:
            for each in self.state.cameras.values():
                each.moves_to = None if each.moves_to in lost else each.moves_to
                if each.node in lost and each.moves_to:
                    self._give(each, each.moves_to)
                elif each.node in lost:
                    each.node = None
            self._place()
            self._is_changed = True
        if self._is_changed and now >= self._save_at:
            try:
                self.keep()
            except OSError:
                self._save_at = now + ASK_S

    def heard(self, *, now: float) -> dict[str, float]:
        return {name: round(now - node.seen, 1) for name, node in self.state.nodes.items()}

    def leave(self, name: str, instance: str, *, now: float) -> None:
        """Move a node's cameras to other nodes where they fit. The node keeps sending requests until its cameras are closed."""
        if self._is_member(name, instance):
            self.state.nodes[name].leaving = True
            held = self.placed()
            elsewhere, _ = place(self.state.cameras.values(), self._open_nodes(), held)
            self._move({camera: node for camera, node in elsewhere.items() if held.get(camera) == name})
            self.keep()

    def gone(self, name: str, instance: str, *, now: float) -> None:
        """Remove a node that has closed all its cameras."""
        if self._is_member(name, instance):
            del self.state.instances[name]
            self.state.nodes[name].seen = -math.inf
            self.tick(now)

    def remove_node(self, name: str, *, now: float) -> None:
        """Stop waiting for a node that will not come back. Raises UserError if the node is still in the cluster."""
        self.tick(now)
        state = self.state
        if name in state.nodes:
            raise UserError(f"node {name} is still in the cluster; stop it or, if it was killed, wait {LEASE_S + GRACE_S:g} s")
        if name not in state.nodes_forgot:
            raise UserError(f"node {name!r} not found; {nearest(name, state.nodes_forgot)}")
        del state.nodes_forgot[name]
        state.instances.pop(name, None)
        state.removed_nodes.append(name)
        self._end_notes()

    def add(self, name: str, given: Fields, *, now: float) -> None:
        """Add a camera to the cluster. Raises UserError if the name is in use or the camera fits on no node.

        ``given``: the fields ``model``, ``fps``, ``only``, ``settings`` and ``by_client`` of a :class:`Camera`.
        """
        self.tick(now)
        if name in self.state.cameras:
            raise UserError(f"stream {name} already exists; remove it first or choose another name")
        camera = self._add(name, given)
        self._place()
        self.keep()
        if camera.problem is not None and all(camera.model in node.needs for node in self.state.nodes.values()):
            self.remove(name, now=now)
            raise UserError(f"{name} does not fit on any node: {camera.problem}")

    def _add(self, name: str, given: Fields) -> Camera:
        state, (epoch, begins) = self.state, self.state.removed.pop(name, (0, 0))
        state.cameras_forgot.setdefault(name, state.number)
        state.cameras[name] = Camera(name, epoch=epoch, begins=begins, **given)
        return state.cameras[name]

    def remove(self, name: str, *, now: float) -> None:
        """Remove a camera from the cluster. Raises UserError."""
        each = self._camera(name)
        del self.state.cameras[name]
        self.state.removed[name] = each.epoch, each.begins
        self._place()
        self.keep()

    def change(self, name: str, fields: Fields, begins: int | None = None, *, now: float) -> None:
        """Pause or resume a camera on any node, or change its settings.

        ``fields``: new values of :class:`Camera`'s ``paused`` or ``switched``. If ``switched`` changes, the camera is opened
        again with an empty memory. If ``begins`` is set, the newest memory is kept, unless it is older than epoch ``begins``.
        Raises UserError.
        """
        camera = self._camera(name)
        vars(camera).update(fields)
        if "switched" in fields:
            self._renew(name, begins)
        self.keep()

    def pause_watch(self, watch: str, paused: bool, cameras: Iterable[str], *, now: float) -> None:
        """Pause or resume a watch on the named cameras, on any node."""
        for camera in (self.state.cameras[name] for name in cameras if name in self.state.cameras):
            others = [each for each in camera.paused_watches if each != watch]
            camera.paused_watches = [*others, watch] if paused else others
        self.keep()

    def watch(self, name: str, fields: Fields | None, *, now: float) -> None:
        """Add or change a watch on all nodes, or remove the watch if ``fields`` is None."""
        if fields is None:
            self.state.watches.pop(name, None)
            self.pause_watch(name, False, self.state.cameras, now=now)
        else:
            self.state.watches[name] = fields
            self.keep()

    def forget(self, camera: str | None, since: float | None, until: float, everything: bool, *, now: float) -> int:
        """Ask all nodes to forget what one or all cameras saw in a period. Return the request's number.

        If ``everything`` is true, the cameras start again with an empty memory. Raises UserError for a camera that never
        existed.
        """
        state, named = self.state, [*self.state.cameras, *self.state.removed]
        if camera is not None and camera not in named:
            raise UserError(f"stream {camera!r} not found; {nearest(camera, named)}")
        state.number += 1
        note = {"number": state.number, "camera": camera, "since": since, "until": until, "all": everything}
        state.notes = [*state.notes, note]
        for name in named if everything else ():
            if camera in (None, name):
                self._renew(name)
        self.keep()
        return state.number

    def _end_notes(self) -> None:
        nodes, cameras = self.state.nodes_forgot, self.state.cameras_forgot
        self.state.notes = [
            note for note in self.state.notes
            if any(each < note["number"] for each in nodes.values())
            or any(each < note["number"] for name, each in cameras.items() if note["camera"] in (None, name))
        ]  # fmt: skip
        self.keep()

    def keep(self) -> None:
        """Save the state. Raises the same errors as ``save``; the next :meth:`tick` then tries again."""
        self._is_changed, self._save_at = True, -math.inf
        self._save(self.state)
        self._is_changed, self._saves = False, self._saves + 1
        self._tell()

    def _tell(self) -> None:
        self.told = self.view()
        self._models = {camera.model for camera in self.state.cameras.values()}

    def placed(self) -> dict[str, str]:
        """Return each camera's node or, for a camera that is moving, the node that it moves to."""
        return {name: node for name, each in self.state.cameras.items() if (node := each.moves_to or each.node)}

    def _is_member(self, name: str, instance: str) -> bool:
        return name in self.state.nodes and self.state.instances.get(name) == instance

    def _camera(self, name: str) -> Camera:
        if name not in self.state.cameras:
            raise UserError(f"stream {name!r} not found; {nearest(name, self.state.cameras)}")
        return self.state.cameras[name]

    def _open_nodes(self) -> list[Node]:
        return [node for node in self.state.nodes.values() if not node.leaving]

    def _spread(self) -> None:
        self._place()
        self._move(rebalance(self.state.cameras.values(), self._open_nodes(), self.placed()))
        self.keep()

    def _place(self) -> None:
        waiting = [each for each in self.state.cameras.values() if each.node is None]
        if waiting:
            held, nodes = self.placed(), self.state.nodes
            staying = [each for name, each in self.state.cameras.items() if not (at := held.get(name)) or not nodes[at].leaving]
            placed, refused = place(staying, self._open_nodes(), held)
            self._move({each.name: placed[each.name] for each in waiting if each.name in placed})
            for each in waiting:
                each.problem = refused.get(each.name)

    def _move(self, moves: Mapping[str, str]) -> None:
        for name, node in moves.items():
            each = self.state.cameras[name]
            if each.node is None:
                self._give(each, node)
            else:
                each.moves_to = None if node == each.node else node

    def _give(self, each: Camera, node: str) -> None:
        each.node, each.moves_to, each.problem = node, None, None
        each.epoch += 1
        self._is_changed = True

    def _renew(self, name: str, begins: int | None = None) -> None:
        if name in self.state.removed:
            epoch = self.state.removed[name][0] + 1
            self.state.removed[name] = epoch, epoch
        else:
            each = self.state.cameras[name]
            each.epoch += 1
            each.begins = each.epoch if begins is None else begins


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


class Lease:
    """Tracks how long a node may watch its cameras without an answer from the head, by the node's monotonic clock."""

    def __init__(self) -> None:
        self._until = -math.inf
        self.orders: dict[str, int] = {}

    def renew(self, asked: float, orders: dict[str, int]) -> None:
        """Allow the node to watch the cameras in ``orders`` until LEASE_S seconds after ``asked``.

        ``asked``: when the node sent its request, in seconds. ``orders``: the epoch of each camera, from the head's answer.
        """
        self._until, self.orders = asked + LEASE_S, orders

    def held(self, now: float) -> dict[str, int]:
        """Return the cameras that the node may watch now, with their epochs."""
        return self.orders if now <= self._until else {}
