"""``edgevlm bench cluster``: a cluster's own placement and failover over simulated nodes, cameras and clocks, without video."""

from __future__ import annotations

import copy
import heapq
import pickle
import random
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.apps.cluster.director import ASK_S, GRACE_S, LEASE_S, Director, Lease
from edgevlm.apps.cluster.head import FILE, STATE, Head, HeadState
from edgevlm.apps.cluster.placement import Camera, Need, Needs, Node
from edgevlm.apps.cluster.shared import SharedFolder
from edgevlm.apps.watches.watch import Watch
from edgevlm.bench.output import Line
from edgevlm.progress import Notify

DAY_S = 86_400.0
SNAPSHOT_S = 30.0  # from one snapshot to the next
CLOSE_S, OPEN_S, LOAD_S = 1.0, 2.0, 20.0  # to write a last snapshot, to read it, to load weights that a node does not have yet
FAULTS = {  # of a node: days from one to the next on average, seconds that it lasts
    "killed": (30.0, (60.0, 600.0)),
    "cut off": (15.0, (2.0, 600.0)),
    "frozen": (30.0, (2.0, 120.0)),
    "replaced": (1000.0, (2 * DAY_S, 5 * DAY_S)),
}
GB = 1 << 30
KINDS = {"small": 8 * GB, "large": 16 * GB}  # memory of a node; half of the nodes are of each
NEEDS = {("small", "model"): Need(2 * GB, GB // 4, 24.0), ("large", "model"): Need(2 * GB, GB // 4, 60.0)}
FPS = 2.0  # of a camera
WATCHES = 10  # of the cluster, and as many notes of what is to be forgotten: in the head's file, and in what nodes are told
HEAD = (5.0, (5.0, 60.0))  # days from one death of the head to the next, seconds until it is back


@dataclass(slots=True)
class Outcome:
    """What a simulation counted. Seconds are of cameras, but for the head's."""

    faults: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)  # each time that a camera was not watched, after a fault
    gaps_waiting: list[float] = field(default_factory=list)  # those while it fitted nowhere
    gaps_moved: list[float] = field(default_factory=list)  # those of a camera that was moved
    forgotten_s: float = 0.0  # watched after the last snapshot of a memory that was lost
    twice: int = 0  # cameras that two nodes watched at the same time
    head_s: float = 0.0  # of processor time, of placement
    saved: int = 0  # how often the head wrote its state

    @property
    def lists(self) -> tuple[list[float], ...]:
        """Of gaps: those after faults, those of no room, those of moves."""
        return self.gaps, self.gaps_waiting, self.gaps_moved


@dataclass(frozen=True, slots=True)
class DayEnd:
    """What has been counted until then. counted: how many of each of an outcome's three lists of gaps."""

    at: float = 0.0
    moves: int = 0
    faults: int = 0
    counted: tuple[int, ...] = (0, 0, 0)


@dataclass(slots=True)
class SimulatedNode:
    """A simulated node. away: None, or the fault that keeps it from asking; watched: epochs; models: whose weights it holds.

    What it is to watch no more is taken from ``watched`` at the fault; its ``lease`` says until when it does.
    """

    node: Node
    away: str | None = None
    asked: float = 0.0
    lease: Lease = field(default_factory=Lease)
    watched: dict[str, int] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)

    def ask(self, asked: float) -> None:
        """It asked then, and was told nothing new."""
        self.asked = asked
        self.lease.renew(asked, self.lease.orders)

    def watches(self, camera: str, now: float) -> bool:
        return self.away in (None, "cut off") and camera in self.lease.held(now)


class Simulation:
    """Nodes and a head that fail at random, and a head's own code.

    Nothing is played of the time between two faults: nodes that can ask are taken to have asked every ASK_S, and ask in the
    play where there is something new for them. What those many askings take of the head is measured once and multiplied.
    """

    def __init__(self, nodes: list[Node], cameras: list[Camera], needs: Needs, days: float, seed: int) -> None:
        self.end, self.random, self.outcome = days * DAY_S, random.Random(seed), Outcome()
        self.now, self._number = 0.0, count()
        self._events: list[tuple[float, int, str, str]] = []
        self._watching: dict[str, SimulatedNode] = {}  # by camera: the node that began last
        self._gap: dict[str, tuple[float, str]] = {}  # since when a camera is not watched, and why
        self.machines = {node.name: SimulatedNode(node) for node in nodes}
        self.models = {camera.name: camera.model for camera in cameras}
        self.needs, self.head_is_up = needs, True
        self.director = Director(needs, self._saved)
        for node in nodes:
            self.director.join(node, 0.0)
        self.director.add(cameras, 0.0)
        for name in self.machines:
            self._ask(name)
            for fault, (every, _) in FAULTS.items():
                self._later(self.random.expovariate(1 / (every * DAY_S)), fault, name)
        self._gap.clear()  # of the beginning
        self.outcome = Outcome()
        self._placed = self._placements()
        self.days = [DayEnd()]
        self._later(self.random.expovariate(1 / (HEAD[0] * DAY_S)), "head dies", "")

    def run(self, progress: Notify) -> Outcome:
        """Play it to its end."""
        while self._events and self._events[0][0] < self.end:
            while self._events[0][0] >= self.days[-1].at + DAY_S:
                self._day_ends(self.days[-1].at + DAY_S)
            self.now, _, what, name = heapq.heappop(self._events)
            progress(f"day {self.now / DAY_S:.1f} of {self.end / DAY_S:g}")
            self._happens(what, name)
        for since, why in self._gap.values():
            self._count(self.end - since, why)
        while self.days[-1].at < self.end:
            self._day_ends(min(self.end, self.days[-1].at + DAY_S))
        return self.outcome

    def _placements(self) -> int:
        return sum(each.epoch for each in self.director.cameras.values())

    def _day_ends(self, at: float) -> None:
        faults, gaps = sum(self.outcome.faults.values()), tuple(map(len, self.outcome.lists))
        self.days.append(DayEnd(at, self._placements() - self._placed, faults, gaps))

    def _saved(self) -> None:
        self.outcome.saved += 1

    def _happens(self, what: str, name: str) -> None:
        machine = self.machines.get(name)
        if what == "head dies":
            self.outcome.faults["head"] += 1
            self.head_is_up, self._kept = False, copy.deepcopy(self.director.state())
            self._later(down := self.random.uniform(*HEAD[1]), "head is back", "")
            for each in self.machines.values():
                if each.away is None:
                    each.ask(self.now)
                if each.away is None and down > LEASE_S:
                    self._stop(each, self.now + LEASE_S, "fault")
        elif what == "head is back":
            self.director, self.head_is_up = Director(self.needs, self._saved), True
            self.director.restore(self._kept, self.now)
            for other in self.machines:
                self._later(self.random.uniform(0, ASK_S), "asks", other)
            self._later(LEASE_S + GRACE_S + 0.1, "looks", "")
            self._later(self.random.expovariate(1 / (HEAD[0] * DAY_S)), "head dies", "")
        elif what == "looks" and self.head_is_up:
            self._look()
        elif machine is not None and what in FAULTS:
            every, lasts = FAULTS[what]
            self._later(self.random.expovariate(1 / (every * DAY_S)), what, name)
            if machine.away is None:
                self._fails(machine, what, self.random.uniform(*lasts))
        elif machine is not None and what == "mended":
            gone, machine.away = machine.away, None
            if gone in ("killed", "replaced"):
                machine.watched, machine.models, machine.lease = {}, set(), Lease()
            self._later(0.0, "asks", name)
        elif machine is not None and what == "asks" and self.head_is_up and machine.away is None:
            self._ask(name)

    def _fails(self, machine: SimulatedNode, fault: str, seconds: float) -> None:
        self.outcome.faults[fault] += 1
        machine.away, asked = fault, self.now - self.random.uniform(0, ASK_S)
        if self.head_is_up:
            machine.ask(asked)
        if fault == "cut off":
            if seconds > LEASE_S:
                self._stop(machine, machine.asked + LEASE_S, "fault")
        else:
            self._stop(machine, self.now, "fault", forget=fault != "frozen")
        if machine.node.name in self.director.members:
            self.director.members[machine.node.name].seen = machine.asked
        self._later(machine.asked + LEASE_S + GRACE_S + 0.1 - self.now, "looks", "")
        self._later(seconds, "mended", machine.node.name)

    def _stop(self, machine: SimulatedNode, at: float, why: str, forget: bool = False) -> None:
        """A node watches its cameras no longer from then on."""
        for camera in machine.watched:
            if camera not in self._gap:
                self._gap[camera] = at, why
                self.outcome.forgotten_s += self.random.uniform(0, SNAPSHOT_S) if forget else 0.0
        machine.watched = {}

    def _look(self) -> None:
        """The head gives what lost nodes had to others; all that can ask have just asked."""
        for name, machine in self.machines.items():
            if machine.away is None and name in self.director.members:
                self.director.members[name].seen = self.now
        began = time.process_time()
        lost = self.director.tick(self.now)
        self.outcome.head_s += time.process_time() - began
        if lost:
            self._schedule_changes()

    def _schedule_changes(self) -> None:
        """Nodes whose cameras are no longer those that they watch ask within ASK_S."""
        for name, each in self.director.cameras.items():
            if each.problem is not None and name in self._gap:
                self._gap[name] = self._gap[name][0], "no room"
            node = each.node
            if node is not None and self.machines[node].watched.get(name) != (None if each.going else each.epoch):
                self._later(self.random.uniform(0, ASK_S), "asks", node)

    def _ask(self, name: str) -> None:
        machine, began = self.machines[name], time.process_time()
        is_back = name not in self.director.members
        if is_back:
            self._stop(machine, self.now, "fault")
            machine.lease = Lease()
            self.director.join(machine.node, self.now)
        orders = self.director.orders(name, machine.watched, self.now)
        self.outcome.head_s += time.process_time() - began
        machine.asked = self.now
        machine.lease.renew(self.now, orders)
        if is_back:
            self._schedule_changes()
        closed = machine.watched.keys() - orders.keys()
        for camera in closed:
            self._gap.setdefault(camera, (self.now, "moved"))
            del machine.watched[camera]
            if going := self.director.cameras[camera].going:
                self._later(CLOSE_S + self.random.uniform(0, ASK_S), "asks", going)
        if closed:  # it says so as soon as their last snapshots are written
            self._later(CLOSE_S, "asks", name)
        for camera in orders.keys() - machine.watched.keys():
            self.outcome.twice += self._is_watched_but_by(machine, camera)
            self._watching[camera] = machine
            model = self.models[camera]
            since, why = self._gap.pop(camera, (self.now, "begun"))
            if why != "begun":
                self._count(max(0.0, self.now + OPEN_S + LOAD_S * (model not in machine.models) - since), why)
            machine.models.add(model)
            machine.watched[camera] = orders[camera]

    def _is_watched_but_by(self, machine: SimulatedNode, camera: str) -> bool:
        other = self._watching.get(camera, machine)
        if other.away is None and self.head_is_up and other.node.name in self.director.members:
            other.ask(self.now)
        return other is not machine and other.watches(camera, self.now)

    def _count(self, seconds: float, why: str) -> None:
        outcome = self.outcome
        {"fault": outcome.gaps, "no room": outcome.gaps_waiting, "moved": outcome.gaps_moved}[why].append(seconds)

    def _later(self, seconds: float, what: str, name: str) -> None:
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._number), what, name))


def cluster(
    nodes: int = 1000,
    cameras: int = 10_000,
    days: float = 30.0,
    seed: int = 0,
    progress: Notify = lambda words: None,
) -> Iterator[Line]:
    """Nodes that are killed, frozen, cut off and replaced at random, and a head that dies: how long cameras were not watched,
    how often they moved, and what the head takes; then the same day by day, of a gap on the day when it ends.
    """
    machines = [
        Node(f"node{i:04d}", kind, KINDS[kind]) for i, kind in zip(range(nodes), ("small", "large") * nodes, strict=False)
    ]
    progress("placing the cameras")
    play = Simulation(machines, [Camera(f"camera{i:05d}", "model", FPS) for i in range(cameras)], NEEDS, days, seed)
    told = play.run(progress)
    costs, of_file = _costs(play)
    asked, ignorant = nodes * days * DAY_S / ASK_S, told.faults["killed"] + told.faults["replaced"]
    head_s = told.head_s + told.saved * costs.save_s + asked * costs.ask_s + ignorant * costs.all_s
    yield {
        "bench": "cluster", "nodes": nodes, "cameras": cameras, "days": days, **_between(DayEnd(), play.days[-1], play),
        "refused": len(told.gaps_waiting), "twice": told.twice, "forgotten_s": round(told.forgotten_s, 1),
        "head_cpu": head_s / (days * DAY_S), "head_bytes": costs.head_bytes, "file_bytes": of_file,
    }  # fmt: skip

    for number, (start, end) in enumerate(pairwise(play.days), 1):
        yield {"bench": "cluster-day", "nodes": nodes, "cameras": cameras, "day": number, **_between(start, end, play)}


def _between(start: DayEnd, end: DayEnd, play: Simulation) -> Line:
    """What a simulation counted in a time."""
    faults, waiting, moved = (of[a:b] for of, a, b in zip(play.outcome.lists, start.counted, end.counted, strict=True))
    gaps = np.array([*faults, *waiting] or [0.0])
    watched = len(play.models) * max(1.0, end.at - start.at)
    return {
        "faults": end.faults - start.faults,
        "availability": 1 - (gaps.sum() + sum(moved)) / watched,
        "moves": end.moves - start.moves,
        **{f"recover_s_p{part}": round(float(np.percentile(gaps, part)), 1) for part in (50, 95, 99)},
    }


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Processor seconds of a head, and its memory.

    ask_s: to answer a node that has not heard of one change yet; all_s: one that knows nothing; save_s: to write its file.
    """

    ask_s: float
    all_s: float
    save_s: float
    head_bytes: int


def _costs(play: Simulation) -> tuple[HeadCosts, int]:
    """What a head takes that has all of a simulation's nodes and cameras, by a real one over a folder; bytes of its file."""
    with tempfile.TemporaryDirectory() as folder:
        state, now = STATE.dump_json(_state(play)), 0.0
        SharedFolder(Path(folder)).write(FILE, state)
        tracemalloc.start()
        head = Head(folder, lambda: now)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        def answer(name: str, mark: str | None) -> dict[str, Any]:
            need = NEEDS[play.machines[name].node.kind, "model"]
            needs = {"model": (need.weights_bytes, need.camera_bytes, need.fps)}
            told = head.ask(name, name, list(play.machines[name].watched), needs, WATCHES, {}, mark)
            pickle.dumps(told)  # as Ray does
            return told

        names, camera = list(play.director.members), next(iter(play.models))
        mark, began = answer(names[0], None)["mark"], time.process_time()
        for name in names[:10]:
            answer(name, None)
        after = time.process_time()
        for paused in (True, False, True):
            head.pause(camera, paused)
        saved = time.process_time()
        for name in names:
            answer(name, mark)
            now += ASK_S / len(names)
        asked = time.process_time()
    costs = HeadCosts((asked - saved) / len(names), (after - began) / len(names[:10]), (saved - after) / 3, held)
    return costs, len(state)


def _state(play: Simulation) -> HeadState:
    """What a head's file has at the end of a simulation, with what real nodes tell and are asked."""
    cameras, nodes = play.models, play.machines
    watch = Watch(name="red", question="is there a person at the door?").model_dump(mode="json")
    given: dict[str, dict[str, Any]] = {
        name: {
            "settings": {"source": f"rtsp://10.0.0.50:554/{name}", "fps": FPS}, "model": model, "fps": FPS, "only": None,
            "by_client": False, "paused": False, "paused_watches": [], "switched": {},
        }
        for name, model in cameras.items()
    }  # fmt: skip
    note = {"camera": None, "since": 0.0, "until": 0.0, "all": False}
    return HeadState(
        play.director.state(), given, {name: name for name in nodes}, dict.fromkeys(nodes, "http://10.0.0.50:8000"),
        {f"watch{i}": {**watch, "name": f"watch{i}"} for i in range(WATCHES)},
        [(name, model, NEEDS[machine.node.kind, model]) for name, machine in nodes.items() for model in {*cameras.values()}],
        [{"number": i + 1, **note} for i in range(WATCHES)], WATCHES,
        {"nodes": dict.fromkeys(nodes, WATCHES), "cameras": dict.fromkeys(cameras, 0)},
    )  # fmt: skip
