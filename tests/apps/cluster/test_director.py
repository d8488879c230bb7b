"""Nodes that are killed, frozen, cut off and slow, beside a head that dies: no camera runs twice, and each is watched again."""

import copy
import random
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgevlm import __version__
from edgevlm.apps.cluster import director as directing
from edgevlm.apps.cluster.director import ASK_S, GRACE_S, LEASE_S, ClusterState, Director, Lease
from edgevlm.apps.cluster.placement import place
from edgevlm.errors import UserError

PC, NANO = (100, 10, 4.0), (100, 20, 2.0)  # bytes of weights and of a camera, frames a second
NODES = {"a": (PC, 150), "b": (PC, 150), "c": (NANO, 150), "d": (PC, 110)}
NAMES = st.sampled_from(sorted(NODES))


def camera(fps=1.0, only=None):
    return {"model": "demo", "fps": fps, "only": only, "settings": {}, "by_client": False}


class Machine:
    """A node as it is: what it watches, and until when."""

    def __init__(self, name, need, memory):
        self.name, self.need, self.memory, self.lease, self.open, self.process = name, need, memory, Lease(), {}, 0
        self.is_up = self.hears = True
        self.is_frozen = False

    def restart(self):
        self.lease, self.open, self.process = Lease(), {}, self.process + 1

    def step(self, director, now):
        """What a node does every few seconds, if it can."""
        if not self.is_up or self.is_frozen:
            return
        with suppress(OSError, UserError):  # nothing can be saved, or the head does not know yet that it was killed
            self.ask(director, now)
        self.open = dict(self.lease.held(now))

    def ask(self, director, now):
        if self.hears:
            try:
                self.renew(director, now)
            except UserError:  # it was lost, and comes again with nothing open
                self.open, self.lease = {}, Lease()
                self.join(director, now)
                self.renew(director, now)

    def join(self, director, now):
        about = {"memory_bytes": self.memory, "url": ""}
        director.join(self.name, str(self.process), about, {}, {}, __version__, now=now)

    def renew(self, director, now):
        told = director.ask(self.name, str(self.process), self.open, {"demo": self.need}, now=now)
        self.lease.renew(now, told["orders"])

    def watches(self, now):
        """A frozen one watches nothing; thawed, it looks at its clock before each frame."""
        return self.open.items() & self.lease.held(now).items() if self.is_up and not self.is_frozen else set()


class Cluster(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now, self.kept, self.count, self.saved, self.failing = 0.0, None, 0, {}, 0
        self.director = Director(ClusterState(), self.keep, self.now)
        self.machines = {name: Machine(name, *about) for name, about in NODES.items()}
        for name in ("a", "b"):
            self.machines[name].ask(self.director, self.now)

    def keep(self, state):
        if self.failing:
            self.failing -= 1
            raise OSError("the disk is full")
        self.kept = copy.deepcopy(state)
        for each in self.kept.cameras.values():
            if each.node is not None:
                assert self.saved.setdefault((each.name, each.epoch), each.node) == each.node, "an epoch is one node's"

    @rule(fps=st.sampled_from([0.5, 1.0, 2.0]), at=st.none() | NAMES)
    def add(self, fps, at):
        if len(self.director.state.cameras) < 12:
            self.count += 1
            with suppress(OSError, UserError):
                self.director.add(f"cam{self.count}", camera(fps, at), now=self.now)

    @precondition(lambda self: self.director.state.cameras)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(self.director.state.cameras)))
        with suppress(OSError):
            self.director.remove(name, now=self.now)

    @rule(times=st.integers(1, 10))
    def saves_fail(self, times):
        self.failing = times

    @rule(name=NAMES, fault=st.sampled_from(["is_up", "hears", "is_frozen"]))
    def break_or_mend(self, name, fault):
        machine = self.machines[name]
        setattr(machine, fault, not getattr(machine, fault))
        if fault == "is_up":
            machine.restart()

    @rule(name=NAMES)
    def leave(self, name):
        with suppress(OSError):
            self.director.leave(name, str(self.machines[name].process), now=self.now)

    @rule()
    def head_dies(self):
        if self.kept is not None:
            self.director = Director(copy.deepcopy(self.kept), self.keep, self.now)

    @rule(seconds=st.floats(0.1, LEASE_S + 2 * GRACE_S), order=st.permutations(sorted(NODES)))
    def time_passes(self, seconds, order):
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 2.0)
            for name in order:
                self.machines[name].step(self.director, self.now)
                self.none_runs_twice()
            with suppress(OSError):
                self.director.tick(self.now)

    @rule()
    def all_is_well_again(self):
        """Everything works for two leases: each camera is watched, or it is said why not, and it is true."""
        self.failing = 0
        for machine in self.machines.values():
            machine.is_up, machine.hears, machine.is_frozen = True, True, False
        for _ in range(20):
            self.time_passes(2.0, list(self.machines))
        watched = [camera for machine in self.machines.values() for camera, _ in machine.watches(self.now)]
        state, held = self.director.state, self.director.placed()
        assert sorted(watched) == sorted(name for name, each in state.cameras.items() if each.problem is None)
        waiting = [each for each in state.cameras.values() if each.problem is not None]
        cameras = [each for each in state.cameras.values() if each.problem is None]
        nodes = [node for node in state.nodes.values() if not node.leaving]
        if all(held[camera.name] in [node.name for node in nodes] for camera in cameras):
            assert not any(camera.name in place([*cameras, camera], nodes, held)[0] for camera in waiting)

    @invariant()
    def none_runs_twice(self):
        watched = [camera for machine in self.machines.values() for camera, _ in machine.watches(self.now)]
        assert len(watched) == len(set(watched)), watched

    @invariant()
    def nobody_is_told_what_was_not_saved(self):
        """Else a head that is started again gives the same epoch to another node."""
        for name, machine in self.machines.items():
            assert {self.saved.get(placed) for placed in machine.lease.orders.items()} <= {name}

    @invariant()
    def no_node_is_too_full(self):
        by_node = {}
        for name, node in self.director.placed().items():
            by_node.setdefault(node, []).append(self.director.state.cameras[name])
        for name, cameras in by_node.items():
            (weights, each, fps), memory = NODES[name]
            assert weights + each * len(cameras) <= memory
            assert sum(camera.fps for camera in cameras) <= fps
            assert {camera.only for camera in cameras} <= {None, name}


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_what_was_saved_is_watched_on_while_nothing_can_be_saved():
    is_full = False

    def save(state):
        if is_full:
            raise OSError("the disk is full")

    def asked(machine, now):
        machine.renew(director, now)
        return machine.lease.orders

    director, (a, b) = Director(ClusterState(), save), (Machine(name, *NODES[name]) for name in ("a", "b"))
    a.ask(director, 0.0)
    director.add("hall", camera(), now=0.0)
    b.join(director, 0.0)
    director.add("yard", camera(only="b"), now=0.0)
    assert asked(a, 0.0) == {"hall": 1}
    assert asked(b, 0.0) == {"yard": 1}
    is_full, lost_at = True, LEASE_S + GRACE_S + 1
    assert asked(b, lost_at) == {"yard": 1}
    assert "a" not in director.state.nodes
    with pytest.raises(OSError, match="full"):
        director.change("yard", {"switched": {"policy": "uniform"}}, now=lost_at)
    assert asked(b, lost_at + 1) == {"yard": 1}
    is_full = False
    assert asked(b, lost_at + 3) == {"hall": 2, "yard": 2}


class Hours:
    """Twenty nodes with a hundred cameras; each node fails once an hour, for seconds or minutes, and the head dies as often."""

    FAULTS = ("is_up", "hears", "is_frozen")
    EVERY_S, LASTS_S = 3600.0, (2.0, 300.0)

    def __init__(self, hours, seed):
        self.random, self.end, self.now = random.Random(seed), hours * 3600.0, 0.0
        self.machines = [Machine(f"node{number}", (100, 10, 20.0), 180) for number in range(20)]
        self.mends, self.head_back, self.director = dict.fromkeys(range(20), 0.0), 0.0, Director()
        for machine in self.machines:
            machine.ask(self.director, 0.0)
        for number in range(100):
            self.director.add(f"cam{number}", camera(fps=2.0), now=0.0)
        self.watched = self.frames = self.twice = self.faults = 0

    def run(self):
        while self.now < self.end:
            self.now += ASK_S
            for number, machine in enumerate(self.machines):
                self.fail_or_mend(number, machine)
            if self.head_back <= self.now:
                if self.fails():
                    self.head_back = self.now + self.random.uniform(5.0, 60.0)
                    self.director = Director(self.director.state, now=self.head_back)
                else:
                    for machine in self.machines:
                        machine.step(self.director, self.now)
                    self.director.tick(self.now)
            watched = [camera for machine in self.machines for camera, _ in machine.watches(self.now)]
            self.watched, self.frames = self.watched + len(set(watched)), self.frames + 100
            self.twice += len(watched) - len(set(watched))
        return self

    def fail_or_mend(self, number, machine):
        if self.mends[number]:
            if self.mends[number] <= self.now:
                if not machine.is_up:
                    machine.restart()
                machine.is_up, machine.hears, machine.is_frozen, self.mends[number] = True, True, False, 0.0
        elif self.fails():
            fault = self.random.choice(self.FAULTS)
            setattr(machine, fault, not getattr(machine, fault))
            self.mends[number] = self.now + self.random.uniform(*self.LASTS_S)

    def fails(self):
        happens = self.random.random() < ASK_S / self.EVERY_S
        self.faults += happens
        return happens


def test_hours_of_random_faults():
    played = Hours(hours=6, seed=1).run()
    assert played.faults > 60
    assert played.twice == 0
    assert played.watched / played.frames > 0.98


def test_a_head_that_gives_cameras_away_early_is_seen(monkeypatch):
    """A node that is cut off watches until its lease ends."""
    monkeypatch.setattr(directing, "GRACE_S", 2 * ASK_S - LEASE_S)
    assert Hours(hours=6, seed=1).run().twice > 0
