"""Equal bytes: what is counted, what is scratch, and the budget that is left."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from policies.filled import PREFIX, Filled, told

from edgevlm.calib.accuracy.memory_accounting import PeakBytes, equal_byte_budget
from edgevlm.calib.accuracy.variants import PLAIN, Budget, Variant
from edgevlm.calib.accuracy.worker import AccuracySettings, Worker, run_case
from edgevlm.runtime.policies import POLICIES, Guidance, Policy, StreamShape, create_policy, evicting, layers_of
from edgevlm.runtime.stateful import bytes_of, undeclared

GRID, BUDGET = (2, 2), 12


def stream(policy, frames=12):
    """Take a policy through a planted stream."""
    filled, rng = Filled(4, BUDGET + 4, GRID, np.random.default_rng(0)), np.random.default_rng(1)
    policy.attach(BUDGET, StreamShape(4, 4, PREFIX))

    def guide():
        layers = policy.needs.guidance_layers
        queries, keys = ({x: rng.normal(size=(heads, 6, 8)).astype(np.float32) for x in layers} for heads in (4, 2))
        return Guidance(queries, keys, (3, 3))

    for _ in range(frames):
        if (plan := policy.before_append(filled.cache, 4, guide)) is not None:
            plan.carry_out(filled.cache)
        policy.after_append(layers_of(filled.cache), told(policy, filled.frame()))


@dataclass
class Mine(Policy):
    """A policy of a user's: what it keeps is in a module that is not edgevlm's."""

    name: ClassVar[str] = "mine"
    paper: ClassVar[str] = "none"
    state_fields = ("history",)

    def attach(self, budget, shape):
        super().attach(budget, shape)
        self.history = {0: [np.zeros(100, np.uint8), np.zeros(15, np.uint8)], "seen": None}

    def score(self, layer):
        return layer.frame.astype(np.float64)


def test_a_policy_in_a_users_module_is_charged_for_what_it_declares():
    policy, peak = Mine(), PeakBytes()
    stream(policy)
    assert bytes_of(policy) == 115
    cache = Filled(1, 8, GRID, np.random.default_rng(0)).cache
    peak.measure(cache, policy)
    assert peak.bytes == cache.nbytes + 115


@pytest.mark.parametrize("name", evicting())
def test_our_own_policies_keep_no_more_than_they_declare(name):
    policy = create_policy(name)
    stream(policy)
    assert undeclared(policy) == []


@pytest.mark.parametrize(("slope", "base"), [(0, 250), (3, 40), (50, 0), (0, 0)])
def test_the_budget_found_is_the_largest_that_fits(slope, base):
    def taken(tokens):
        return 100 * tokens + base + slope * tokens

    best = max(tokens for tokens in range(101) if taken(tokens) <= 10_000)
    assert equal_byte_budget(100, 10_000, 100, 4, taken) == best


@pytest.fixture(scope="module")
def worker():
    return Worker(AccuracySettings(frames=16))


@pytest.fixture(scope="module")
def plain(worker):
    return run_case(worker.model, worker.case(0), create_policy(PLAIN.policy), 128)


@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if kind.bounded])
def test_every_policy_stays_within_the_bytes_of_a_plain_window(worker, plain, name):
    (run,) = worker.runs([Variant(name)], Budget("50%", 0.5))
    result = run_case(worker.model, worker.case(0), create_policy(name), run.tokens)
    assert plain["bytes"] == run.allowed
    assert result["bytes"] <= plain["bytes"]
    assert run.tokens == 128 or run_case(worker.model, worker.case(0), create_policy(name), 128)["bytes"] > plain["bytes"]
