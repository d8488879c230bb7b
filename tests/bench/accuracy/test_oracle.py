"""The oracle holds what is asked about: never less than a random policy, on planted streams."""

import itertools

import numpy as np
import pytest
from policies.filled import PREFIX, Filled

from edgevlm.calib.accuracy.oracle import ORACLES, make_oracle, ranking
from edgevlm.calib.accuracy.worker import held_tokens, overlap
from edgevlm.runtime.policies import StreamShape, create_policy

GRID, BUDGET = (2, 2), 10


def answered(policy, case):
    """How many questions still have evidence in the memory after the stream."""
    filled = Filled(1, BUDGET, GRID, np.random.default_rng(0))
    policy.attach(BUDGET, StreamShape(1, 4, PREFIX))
    for _ in case.frames:
        plan = policy.before_append(filled.cache, 4, None)
        if plan is not None:
            filled.cache.evict(plan.keep)
        filled.frame()
    held = held_tokens(filled.cache, case.owners.size, GRID)
    assert held.sum(2).max() <= BUDGET
    return sum(overlap(held, question.evidence)[1] for question in case.questions)


@pytest.mark.parametrize("name", [name for name, plan in ORACLES.items() if plan[1] == 0])
def test_an_oracle_holds_evidence_for_as_many_questions_as_can_be(planted, name):
    total = {"oracle": 0.0, "random": 0.0}
    for seed in range(12):
        case = planted(seed, objects=8)
        oracle = answered(make_oracle(name, case), case)
        random = max(answered(create_policy(f"random:seed={s}"), case) for s in range(5))
        assert oracle >= random
        asked = len(case.questions)
        assert oracle >= min(asked, BUDGET - 4), "one token each, in the rows that a coming frame leaves"
        total["oracle"] += oracle
        total["random"] += random
    assert total["oracle"] > 1.3 * total["random"]


def test_ranking_goes_in_rounds_over_what_is_asked_then_other_objects_then_background(planted):
    case = planted(3, objects=4)
    case.questions.append(case.questions[2])  # asked twice: first in each round
    case.questions.pop(0)
    priority = ranking(case, "newest")
    order = np.argsort(-priority, kind="stable").tolist()
    assert len(set(priority.tolist())) == len(priority)
    groups = [q.evidence.tolist() for q in case.questions[:-1]]
    assert order[0] == case.questions[-1].evidence[-1]
    assert {*order[: len(groups)]} == {group[-1] for group in groups}, "the first round: one token of each"
    flat = case.owners.ravel()
    kinds = ["asked" if any(t in g for g in groups) else "object" if flat[t] >= 0 else "background" for t in order]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["asked", "object", "background"]
