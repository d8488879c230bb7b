"""The head of a cluster: a :class:`Director` with a clock and a file, and what nodes need to know of each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from edgevlm import __version__
from edgevlm.apps.cluster.director import GRACE_S, LEASE_S, Director, DirectorState
from edgevlm.apps.cluster.placement import Camera, Need, Node
from edgevlm.apps.cluster.shared import shared_at
from edgevlm.apps.credentials import mask_credentials
from edgevlm.errors import UserError, nearest

FILE = "cluster.json"
NEWEST = "head.id"  # which head was started last over a folder
LOOK_S = 2.0  # between looks at it: far less than GRACE_S, for leases go on meanwhile
LOOKING_S = 1.0  # that a look may take before nodes are answered all the same
View = Mapping[str, Any]
EMPTY: View = {
    "nodes": {}, "cameras": {}, "removed": {}, "nodes_forgot": {}, "cameras_forgot": {}, "watches": {}, "notes": [],
}  # fmt: skip


@dataclass(slots=True)
class HeadState:
    """What a head's file has.

    given: cameras as :meth:`Head.add` takes them. instances: which process goes by a node's name, lost ones too. notes: of
    what is to be forgotten, by number, until all have; ``number`` is the newest one's, and ``forgotten`` how far each is.
    removed_nodes: whose names are not taken again.
    """

    director: DirectorState = field(default_factory=DirectorState)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    watches: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: list[tuple[str, str, Need]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    forgotten: dict[str, dict[str, int]] = field(default_factory=lambda: {"nodes": {}, "cameras": {}})
    removed_nodes: list[str] = field(default_factory=list)


STATE = TypeAdapter(HeadState)


class HeadAway(Exception):
    """The head does not answer."""


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def boot_time() -> float:
    """Seconds of a clock that never goes back, and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Head:
    """Answers the nodes; calls come one at a time. Its state outlives it, in a file below ``where``.

    If two heads share ``where``, only the one that was started last gives out cameras: the other's :meth:`join`, :meth:`ask`
    and changes raise UserError. All arguments and answers are JSON. Raises UserError for a file that cannot be read or written.
    """

    def __init__(self, where: str, clock: Callable[[], float] = boot_time) -> None:
        self._where, self._shared, self._clock = mask_credentials(where), shared_at(where), clock
        self._id, self._is_replaced, self._look_at = uuid4().hex, False, -float("inf")
        self._looker = ThreadPoolExecutor(1, "edgevlm-head")  # a share that hangs holds up no answer
        self._look: Future[None] | None = None
        self._read()  # a file that is refused leaves a head that runs as it is
        try:
            self._shared.write(NEWEST, self._id.encode())
        except OSError as error:
            raise UserError(f"{self._where}/{NEWEST}: cannot be written ({error.strerror or error})") from None
        self._state = self._read()
        self._needs = {(kind, model): need for kind, model, need in self._state.needs}
        self._director = Director(self._needs, self._save)
        self._director.restore(self._state.director, clock())
        self._view, self._saves = self.view(), 0  # the view that was saved, which nodes get

    def join(
        self,
        node: Mapping[str, Any],
        instance: str,
        url: str,
        cameras: Mapping[str, Mapping[str, Any]],
        watches: Mapping[str, Mapping[str, Any]],
        version: str,
    ) -> list[str]:
        """Take in a node with nothing open, and its configuration's cameras and watches; return a line for each not taken.

        Cameras are as :meth:`add` takes them. Raises UserError while another process of that name may be watching, for a node
        that was removed, which may still keep what was to be forgotten, and for another minor version of edgevlm.
        """
        self._check_is_newest()
        if minor(version) != minor(__version__):
            raise UserError(
                f"node {node['name']} has edgevlm {version} and the head {__version__}: only versions that begin alike, as "
                f"{minor(__version__)}.x, go together; install edgevlm=={__version__} here, or end all nodes and upgrade all"
            )
        self._tick()
        state, name, now = self._state, node["name"], self._clock()
        is_back = state.instances.get(name) == instance  # what was removed meanwhile stays so until the process is restarted
        if (known := self._director.members.get(name)) is not None and not is_back:
            left = known.seen + LEASE_S + GRACE_S - now
            raise UserError(f"there is a node {name} already; if it was killed it is free in {max(1.0, left):.0f} s")
        if name in state.removed_nodes:
            raise UserError(
                f"node {name} was removed from the cluster; if it is the same machine empty its --state, which may hold what"
                " was to be forgotten, and give it another cluster.node"
            )
        state.forgotten["nodes"].setdefault(name, 0)
        refused = []
        for camera, given in cameras.items():
            if is_back and camera in self._director.removed:
                continue
            if camera not in state.given:
                self._add(camera, given)
            elif state.given[camera]["settings"] != given["settings"]:
                refused.append(f"{camera}: another node has other settings for it, which stay; remove it first to change them")
        for watch, fields in {} if is_back else watches.items():
            if state.watches.setdefault(watch, dict(fields)) != fields:
                refused.append(f"watch {watch}: another node has another one of that name, which stays")
        state.instances[name], state.urls[name] = instance, url
        self._director.join(Node(name, name, int(node["memory_bytes"])), now)
        return refused

    def ask(
        self,
        name: str,
        instance: str,
        open: Iterable[str],
        needs: Mapping[str, tuple[int, int, float]],
        forgotten: int = 0,
        forgotten_of: Mapping[str, int] | None = None,
        mark: str | None = None,
    ) -> dict[str, Any]:
        """Return what a node is to watch until LEASE_S after it asked, and the view, None where its ``mark`` is the newest.

        open: cameras whose memory it has open. needs: of models that it was asked about, as a :class:`Need` has them.
        forgotten: the number of the last note that was followed in what the node keeps; forgotten_of: in memories of cameras.
        Raises UserError for a node that has to join again.
        """
        self._check_is_newest()
        if not self._is_member(name, instance):
            raise UserError(f"there is no node {name} of that process")
        now = self._clock()
        orders = self._director.orders(name, open, now)
        told = {(name, model): Need(*need) for model, need in needs.items()}
        if not told.items() <= self._needs.items():
            self._needs.update(told)
            self._director.spread()
            orders = self._director.orders(name, open, now)
        self._tick()
        self._have_forgotten(name, forgotten, forgotten_of or {})
        newest, models = f"{self._id} {self._saves}", {each["model"] for each in self._view["cameras"].values()}
        return {
            "orders": orders,
            "unknown": sorted(model for model in models if (name, model) not in self._needs),
            "mark": newest,
            "view": None if mark == newest else self._view,
        }

    def view(self) -> dict[str, Any]:
        """Return nodes and cameras, where they are, and what else all nodes know, as :data:`EMPTY` has it."""
        state = self._state
        return {
            "nodes": {
                name: {"url": state.urls[name], "leaving": member.leaving} for name, member in self._director.members.items()
            },
            "cameras": {
                name: {
                    **state.given[name], "node": each.node, "moves_to": each.going, "epoch": each.epoch,
                    "begins": each.begins, "problem": each.problem,
                }
                for name, each in self._director.cameras.items()
            },
            "removed": {camera: begins for camera, (_, begins) in self._director.removed.items()},
            "nodes_forgot": dict(state.forgotten["nodes"]),
            "cameras_forgot": dict(state.forgotten["cameras"]),
            "watches": dict(state.watches),
            "notes": state.notes,
        }  # fmt: skip

    def heard(self) -> dict[str, float]:
        """Seconds since each node last asked."""
        now = self._clock()
        return {name: round(now - member.seen, 1) for name, member in self._director.members.items()}

    def add(self, name: str, given: Mapping[str, Any]) -> None:
        """Watch a camera. Raises UserError for a name in use, and, with the reason, where it fits nowhere.

        given: ``settings``, as edgevlm.toml has them, ``model``, ``fps``, ``only``, the one node that can, or None, and
        ``by_client``. Added to it: ``paused``, ``paused_watches``, and ``switched``, settings that replace some of those.
        """
        self._tick()
        if name in self._state.given:
            raise UserError(f"there is a stream {name} already; remove it first, or choose another name")
        self._add(name, given)
        problem = self._director.cameras[name].problem
        if problem is not None and all((node, given["model"]) in self._needs for node in self._director.members):
            self.remove(name)
            raise UserError(f"{name} fits on no node: {problem}")

    def _add(self, name: str, given: Mapping[str, Any]) -> None:
        self._state.forgotten["cameras"].setdefault(name, self._state.number)
        self._state.given[name] = {"paused": False, "paused_watches": [], "switched": {}, **given}
        self._director.add([Camera(name, given["model"], given["fps"], given["only"])])

    def remove(self, name: str) -> None:
        """Watch a camera no longer. Raises UserError."""
        self._camera(name)
        del self._state.given[name]
        self._director.remove(name)

    def pause(self, name: str, paused: bool) -> None:
        """Pause a camera, or let it go on, wherever it is watched. Raises UserError."""
        self._camera(name)["paused"] = paused
        self._director.keep()

    def switch(self, name: str, switched: Mapping[str, Any], begins: int | None = None) -> int:
        """Open a camera again with these settings in place of some of its own; return its new epoch. Raises UserError.

        begins: as :meth:`Director.renew` takes it.
        """
        self._camera(name)["switched"] = dict(switched)
        return self._director.renew(name, begins)

    def pause_watch(self, watch: str, paused: bool, cameras: Iterable[str]) -> None:
        """Pause a watch on these cameras, or let it go on there, wherever they are watched."""
        for given in (self._state.given[name] for name in cameras if name in self._state.given):
            others = [each for each in given["paused_watches"] if each != watch]
            given["paused_watches"] = [*others, watch] if paused else others
        self._director.keep()

    def _camera(self, name: str) -> dict[str, Any]:
        if name not in self._state.given:
            raise UserError(f"there is no stream {name!r}; {nearest(name, self._state.given)}")
        return self._state.given[name]

    def watch(self, name: str, fields: Mapping[str, Any] | None) -> None:
        """Ask a watch on all nodes; None removes it."""
        if fields is None:
            self._state.watches.pop(name, None)
            self.pause_watch(name, False, self._state.given)
        else:
            self._state.watches[name] = dict(fields)
        self._director.keep()

    def forget(self, camera: str | None, since: float | None, until: float, everything: bool) -> int:
        """Note what all nodes have to forget of a camera, or of all cameras; return the note's number.

        everything: cameras begin with an empty memory. Raises UserError for a camera that there never was.
        """
        state, named = self._state, [*self._state.given, *self._director.removed]
        if camera is not None and camera not in named:
            raise UserError(f"there is no stream {camera!r}; {nearest(camera, named)}")
        state.number += 1
        note = {"number": state.number, "camera": camera, "since": since, "until": until, "all": everything}
        state.notes = [*state.notes, note]
        for name in named if everything else ():
            if camera in (None, name):
                self._director.renew(name)
        self._director.keep()
        return state.number

    def _have_forgotten(self, node: str, number: int, cameras: Mapping[str, int]) -> None:
        nodes, known = self._state.forgotten["nodes"], self._state.forgotten["cameras"]
        new = {name: each for name, each in cameras.items() if each > known.get(name, 0)}
        if number > nodes.get(node, 0) or new:
            nodes[node] = max(number, nodes.get(node, 0))
            known.update(new)
            self._end_notes()

    def _end_notes(self) -> None:
        """Drop the notes that all nodes and cameras have followed."""
        nodes, cameras = self._state.forgotten["nodes"], self._state.forgotten["cameras"]
        self._state.notes = [
            note for note in self._state.notes
            if any(each < note["number"] for each in nodes.values())
            or any(each < note["number"] for name, each in cameras.items() if note["camera"] in (None, name))
        ]  # fmt: skip
        self._director.keep()

    def remove_node(self, name: str) -> None:
        """Wait no more for a node that does not come back. Raises UserError for one that is there."""
        self._tick()
        nodes = self._state.forgotten["nodes"]
        if name in self._director.members:
            raise UserError(f"node {name} is there; end it, and wait {LEASE_S + GRACE_S:g} s where it was killed")
        if name not in nodes:
            raise UserError(f"there is no node {name!r}; {nearest(name, nodes)}")
        del nodes[name]
        self._state.instances.pop(name, None)
        for known in [known for known in self._needs if known[0] == name]:
            del self._needs[known]
        self._state.removed_nodes.append(name)
        self._end_notes()

    def leave(self, name: str, instance: str) -> None:
        """Empty a node, which goes on asking until it has nothing open."""
        if self._is_member(name, instance):
            self._director.leave(name)

    def gone(self, name: str, instance: str) -> None:
        """Give a node up at once: it has closed all that it had open, and asks no more."""
        if self._is_member(name, instance):
            self._director.members[name].seen = -float("inf")
            self._tick()
            del self._state.instances[name]

    def _is_member(self, name: str, instance: str) -> bool:
        return name in self._director.members and self._state.instances[name] == instance

    def _tick(self) -> None:
        self._director.tick(self._clock())
        self._state.urls = {name: url for name, url in self._state.urls.items() if name in self._director.members}

    def _check_is_newest(self) -> None:
        """Raise UserError where another head was started since. A folder that is away proves nothing."""
        now = self._clock()
        if now >= self._look_at and (self._look is None or self._look.done()):
            self._look_at, self._look = now + LOOK_S, self._looker.submit(self._look_who_is_newest)
            wait([self._look], LOOKING_S)
        self._refuse_if_replaced()

    def _look_who_is_newest(self) -> None:
        with suppress(OSError):
            self._is_replaced = self._is_replaced or self._shared.read(NEWEST) != self._id.encode()

    def _refuse_if_replaced(self) -> None:
        if self._is_replaced:
            raise UserError(f"another head was started over {self._where}, and has the cameras now; end this one, join that")

    def _save(self) -> None:
        """Write the file in one step, before any node gets it. Raises OSError, and UserError where there is a newer head."""
        self._look_who_is_newest()
        self._refuse_if_replaced()
        self._state.director = self._director.state()
        self._state.needs = [(*key, need) for key, need in self._needs.items()]
        self._shared.write(FILE, STATE.dump_json(self._state))
        self._look_who_is_newest()  # one that was started meanwhile has not read this
        self._refuse_if_replaced()
        self._view, self._saves = self.view(), self._saves + 1

    def _read(self) -> HeadState:
        """Read the file; an empty state where there is none. Raises UserError."""
        try:
            known = STATE.validate_json(self._shared.read(FILE))
        except FileNotFoundError:
            return HeadState()
        except OSError as error:
            raise UserError(f"{self._where}/{FILE}: cannot be read ({error.strerror or error})") from None
        except ValidationError as error:
            raise self._not_a_head(error.errors()[0]["msg"]) from None
        nodes = {node.name for node, _ in known.director.nodes}
        cameras = {each.camera.name for each in known.director.cameras}
        has_all = nodes <= known.urls.keys() & known.instances.keys() and cameras <= known.given.keys()
        if not has_all or not {"nodes", "cameras"} <= known.forgotten.keys():
            raise self._not_a_head("it names nodes or cameras that it does not describe")
        known.given = {each.camera.name: known.given[each.camera.name] for each in known.director.cameras}
        return known

    def _not_a_head(self, why: str) -> UserError:
        return UserError(f"{self._where}/{FILE}: is no head's ({why}); move it away to begin without it")
