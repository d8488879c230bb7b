"""Sequences of operations on caches, clusters and stores, each beside a plain account of the same, checked after each.

``python tests/fuzz/states.py [operations] [seed]`` runs the machines of the tests in turn until they have done that many, a
million unless given, and prints how many each did; the first that goes wrong ends it, with the shortest sequence.
``tests/sanitize.sh states`` does the same under AddressSanitizer and UBSan, ``tests/sanitize.sh thread states`` under
ThreadSanitizer.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from edgevlm.runtime.kv import DTYPES

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
STEPS, EXAMPLES = 50, 40  # operations of a sequence; sequences of a machine, in turn
DONE: Counter[str] = Counter()


def counted(machine: Any, name: str) -> Any:
    """The machine, which counts its operations in DONE."""

    class Counted(machine):  # type: ignore[misc]
        @invariant()
        def count(self) -> None:
            DONE[name] += 1

    return Counted


def of_clusters() -> Any:
    """Hash clusters of every size: tokens join, and leave in parts."""
    tests = import_module("retrieval.test_hash_clusters")

    class Clusters(RuleBasedStateMachine):
        @initialize(slots=st.integers(4, 60), distance=st.integers(0, 32), seed=st.integers(0, 2**32))
        def start(self, slots: int, distance: int, seed: int) -> None:
            self.both, self.held = tests.Both(slots, distance), []
            self.random = np.random.default_rng(seed)

        @rule(count=st.integers(1, 30))
        def join(self, count: int) -> None:
            first = len(self.both.tokens)
            self.both.join(*tests.tokens(self.random, count))
            self.held += range(first, first + count)

        @rule(share=st.floats(0, 1))
        def leave(self, share: float) -> None:
            held, leaving = list(self.random.permutation(self.held)), self.random.random(len(self.held)) < share
            if held:
                self.both.leave(held, leaving)
            self.held = [seq for seq, goes in zip(held, leaving, strict=True) if not goes]

        @invariant()
        def is_the_account(self) -> None:
            if hasattr(self, "both"):
                self.both.check()

    return Clusters


def machines() -> list[Any]:
    """A cache of each dtype, clusters, a store and one that crashes."""
    found = []
    for dtype in DTYPES:
        made = counted(import_module("cache.test_stateful").Twin, f"cache {dtype}")
        made.kit = import_module("cache.conftest").kit_of("cpu", dtype)
        found.append(made)
    found.append(counted(of_clusters(), "clusters"))
    for module, name in (("test_store", "Beside"), ("test_crashes", "Crashes")):
        found.append(counted(getattr(import_module(f"store.{module}"), name), f"store {name.lower()}"))
    return found


def main(operations: int = 1_000_000, seed: int = 0) -> None:
    every, done = machines(), -1
    options = settings(
        max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, database=None,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    while done < DONE.total() < operations:
        done = DONE.total()
        for machine in every:
            hypothesis.core.global_force_seed = seed
            run_state_machine_as_test(machine, settings=options)
        seed += 1
    print(f"{DONE.total():,} operations: {', '.join(f'{count:,} {name}' for name, count in DONE.items())}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
