"""Who watches what, and since when: the state of a cluster's head, changed by calls that are given the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edgevlm.apps.cluster.placement import Camera, Needs, Node, place, rebalance
from edgevlm.errors import UserError, nearest

ASK_S = 2.0  # from one question of a node to the next
LEASE_S = 15.0  # that a node may watch on after the last answer of its head
GRACE_S = 5.0  # more, before the head gives its cameras to others: clocks differ, and calls take time
NOWHERE: tuple[str | None, int, str | None] = (None, 0, None)  # node, epoch and next node of a camera that was not saved


@dataclass(slots=True)
class Assignment:
    """A camera and the node that watches it.

    epoch: counts its placements, and fences late writes of earlier ones. begins: the epoch that began with an empty memory;
    older ones are no longer read. going: the next node, once ``node`` has written its last snapshot.
    """

    camera: Camera
    node: str | None = None
    going: str | None = None
    epoch: int = 0
    begins: int = 0
    problem: str | None = None  # why no node watches it


@dataclass(slots=True)
class Member:
    """A node. seen: when it was last heard of. leaving: it is being emptied, and gets no more cameras."""

    node: Node
    seen: float
    leaving: bool = False


@dataclass(slots=True)
class DirectorState:
    """All that outlives the head: nodes, cameras, where they are, and their epochs."""

    removed: dict[str, tuple[int, int]] = field(default_factory=dict)
    nodes: list[tuple[Node, bool]] = field(default_factory=list)  # and whether it is being emptied
    cameras: list[Assignment] = field(default_factory=list)


@dataclass(slots=True)
class Director:
    """Places cameras on nodes. Nothing here reads a clock, a network or a disk: real heads and simulated ones are the same.

    A node asks for its :meth:`orders` every few seconds and watches those cameras, with those epochs, until LEASE_S after it
    asked. A camera that moves is nobody's until the node that had it says that it is closed. A node that has not asked for
    LEASE_S + GRACE_S is lost, and its cameras go to others: by then it has stopped, whether it is dead, frozen or cut off.
    save: called after each change of :meth:`state`, before anybody is told of it. While it raises OSError nodes have what was
    saved before, and nothing moves.
    """

    needs: Needs
    save: Callable[[], object] = lambda: None
    members: dict[str, Member] = field(default_factory=dict)
    cameras: dict[str, Assignment] = field(default_factory=dict)
    removed: dict[str, tuple[int, int]] = field(default_factory=dict)  # epoch and begins, from which those of that name go on
    _saved: dict[str, tuple[str | None, int, str | None]] = field(default_factory=dict)  # node, epoch, going; by camera
    _save_at: float | None = None  # when what could not be saved is tried again

    def join(self, node: Node, now: float) -> None:
        """Add a node; cameras that fit nowhere, and some of full nodes, go to it."""
        self.members[node.name] = Member(node, now)
        self.spread()

    def spread(self) -> None:
        """Place cameras that wait, and move some of full nodes, after nodes or their abilities changed."""
        self._place()
        cameras = [each.camera for each in self.cameras.values()]
        self._move(rebalance(cameras, self._open_nodes(), self.needs, self.placed()))
        self.keep()

    def leave(self, name: str) -> None:
        """Empty a node: its cameras go to others where they fit, and stay where they do not. Raises UserError."""
        self._member(name).leaving = True
        held = self.placed()
        elsewhere = place([each.camera for each in self.cameras.values()], self._open_nodes(), self.needs, held)
        self._move({camera: node for camera, node in elsewhere.placed.items() if held.get(camera) == name})
        self.keep()

    def add(self, cameras: Iterable[Camera]) -> None:
        """Watch cameras from now on; their ``problem`` says why they fit on no node. Raises UserError for a name in use."""
        for camera in cameras:
            if camera.name in self.cameras:
                raise UserError(f"there is a stream {camera.name} already; remove it first, or choose another name")
            epoch, begins = self.removed.pop(camera.name, (0, 0))
            self.cameras[camera.name] = Assignment(camera, epoch=epoch, begins=begins)
        self._place()
        self.keep()

    def remove(self, name: str) -> None:
        """Watch a camera no longer."""
        each = self.cameras.pop(name)
        self.removed[name] = each.epoch, each.begins
        self._place()
        self.keep()

    def renew(self, name: str, begins: int | None = None) -> int:
        """Have a camera opened again where it is, with an empty memory, or with the newest since ``begins``; its new epoch.

        A removed one has it when it is added again.
        """
        if name in self.removed:
            epoch = self.removed[name][0] + 1
            self.removed[name] = epoch, epoch
            self.keep()
            return epoch
        each = self.cameras[name]
        each.epoch += 1
        each.begins = each.epoch if begins is None else begins
        self.keep()
        return each.epoch

    def orders(self, name: str, open: Iterable[str], now: float) -> dict[str, int]:
        """The cameras that a node watches until LEASE_S from when it asked, with their epochs. Raises UserError for a lost one.

        open: those whose memory it still has open.
        """
        self._member(name).seen, open = now, set(open)
        saved = {camera: self._saved.get(camera, NOWHERE) for camera in self._of(name)}
        leaving = [self.cameras[camera] for camera, (_, _, going) in saved.items() if going and camera not in open]
        closed = [(each, each.going) for each in leaving if each.going]
        for each, node in closed:
            self._give(each, node)
        if closed:  # there is room here
            self._place()
        self._keep_if_possible(now, bool(closed))
        found = {camera: self._saved.get(camera, NOWHERE) for camera in self._of(name)}
        return {camera: epoch for camera, (node, epoch, going) in found.items() if node == name and going is None}

    def tick(self, now: float) -> list[str]:
        """Give the cameras of lost nodes to others; the nodes that were lost."""
        lost = [name for name, member in self.members.items() if now - member.seen > LEASE_S + GRACE_S]
        for name in lost:
            del self.members[name]
        if lost:
            for each in self.cameras.values():
                each.going = None if each.going in lost else each.going
                if each.node in lost and each.going:
                    self._give(each, each.going)
                elif each.node in lost:
                    each.node = each.going = None
            self._place()
        self._keep_if_possible(now, bool(lost))
        return lost

    def keep(self) -> None:
        """Save what has changed. Raises whatever ``save`` does; then the next orders try again."""
        self._save_at = -float("inf")
        self.save()
        self._note_saved()

    def _note_saved(self) -> None:
        self._save_at = None
        self._saved = {name: (each.node, each.epoch, each.going) for name, each in self.cameras.items()}

    def _keep_if_possible(self, now: float, is_changed: bool) -> None:
        if is_changed or (self._save_at is not None and now >= self._save_at):
            try:
                self.keep()
            except OSError:
                self._save_at = now + ASK_S

    def placed(self) -> dict[str, str]:
        """Node by camera: where those that move go."""
        return {name: node for name, each in self.cameras.items() if (node := each.going or each.node)}

    def state(self) -> DirectorState:
        """Return what :meth:`restore` takes, of the very cameras that it has."""
        return DirectorState(
            self.removed, [(member.node, member.leaving) for member in self.members.values()], list(self.cameras.values())
        )

    def restore(self, state: DirectorState, now: float) -> None:
        """Go on as a head that was killed did; each node has a lease's time to ask again."""
        self.removed = dict(state.removed)
        self.members = {node.name: Member(node, now, leaving) for node, leaving in state.nodes}
        for each in state.cameras:
            self.cameras[each.camera.name] = each
        self._note_saved()

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise UserError(f"there is no node {name!r}; {nearest(name, self.members)}")
        return self.members[name]

    def _open_nodes(self) -> list[Node]:
        return [member.node for member in self.members.values() if not member.leaving]

    def _place(self) -> None:
        """Give unwatched cameras a node, if one has room for them."""
        waiting = [name for name, each in self.cameras.items() if each.node is None]
        if not waiting:
            return
        leaving = {name for name, member in self.members.items() if member.leaving}
        held = self.placed()
        staying = [each.camera for name, each in self.cameras.items() if held.get(name) not in leaving]
        found = place(staying, self._open_nodes(), self.needs, held)
        self._move({name: found.placed[name] for name in waiting if name in found.placed})
        for name in waiting:
            self.cameras[name].problem = found.refused.get(name)

    def _move(self, moves: dict[str, str]) -> None:
        for name, node in moves.items():
            each = self.cameras[name]
            if each.node is None:
                self._give(each, node)
            else:
                each.going = None if node == each.node else node

    def _give(self, each: Assignment, node: str) -> None:
        each.node, each.going, each.problem = node, None, None
        each.epoch += 1

    def _of(self, node: str) -> list[str]:
        """The cameras of a node."""
        return [name for name, each in self.cameras.items() if each.node == node]


class Lease:
    """How long a node may watch on without its head. Times are of the node's own clock, which never goes back."""

    def __init__(self) -> None:
        self._until = -float("inf")
        self.orders: dict[str, int] = {}

    def renew(self, asked: float, orders: dict[str, int]) -> None:
        """The head's answer to what was asked then."""
        self._until, self.orders = asked + LEASE_S, orders

    def held(self, now: float) -> dict[str, int]:
        """Cameras that may be watched now, with their epochs; none once the lease has ended."""
        return self.orders if now <= self._until else {}
