"""What a result reports: the overlap of planted caches, and the answers that a plain session gives."""

import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from policies.filled import PREFIX, Filled

from edgevlm.calib.accuracy.cases import make_case, seed_words
from edgevlm.calib.accuracy.pools import in_processes
from edgevlm.calib.accuracy.variants import Budget, Variant
from edgevlm.calib.accuracy.worker import TEXT_BUDGET, AccuracySettings, Worker, held_tokens, overlap, run_case
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.session import Session


def test_overlap_of_a_planted_cache():
    """Two layers of two heads; of tokens 4 to 7 they hold 4, 2, none and 1."""
    filled = Filled(2, 12, (2, 2), np.random.default_rng(0))
    for _ in range(3):
        filled.frame()
    keep = [np.ones((2, PREFIX + 12), bool) for _ in range(2)]
    keep[0][0, PREFIX + np.array([0, 1, 2, 3])] = False
    keep[0][1, PREFIX + np.array([6, 7, 8, 9])] = False
    keep[1][0, PREFIX + np.array([4, 5, 6, 7])] = False
    keep[1][1, PREFIX + np.array([4, 5, 6, 0])] = False
    filled.cache.evict(keep)
    held = held_tokens(filled.cache, 12, (2, 2))
    assert held.sum(2).tolist() == [[8, 8], [8, 8]]
    share, some = overlap(held, np.array([4, 5, 6, 7]))
    assert share == pytest.approx((4 + 2 + 0 + 1) / 16)
    assert some == pytest.approx(3 / 4)
    assert overlap(held, np.array([], np.int64)) == (None, None)


@pytest.mark.parametrize("name", ["infinipot-v", "hermes"])
def test_answers_are_those_of_a_plain_session(demo, name):
    case = make_case(seed_words("0"), 1, 24)
    result = run_case(demo, case, create_policy(name), 64)
    assert [found["kind"] for found in result["results"]] == [question.kind for question in case.questions]
    assert result["compressions"] > 3
    with Session.open(demo, policy=name, budget=64, append="all") as session:
        for frame in case.frames:
            session.watch(frame)
        for question, found in zip(case.questions, result["results"], strict=True):
            assert session.ask(question.text).text.strip() == found["answer"]
            assert found["right"] == (found["answer"] == question.answer)
    assert 0 < max(found["held"] for found in result["results"] if found["held"] is not None) <= 1


def test_the_present_and_its_references_count_in_equal_bytes():
    worker = Worker(AccuracySettings("demo", 16, "3"))
    labels = ("sliding-window", "sliding-window@changed:tau=0.999")
    whole, changed = worker.runs([*map(Variant, labels)], Budget("50%", 0.5))
    assert whole.tokens == 128 > changed.tokens
    assert whole.allowed == changed.allowed

    def taken(tokens):
        settings = {"append": "changed:tau=0.999", "encode": "all", "text_budget": TEXT_BUDGET}
        with Session.open(worker.model, policy="sliding-window", budget=tokens, **settings) as session:
            for frame in worker.case(0).frames:
                session.watch(frame)
            assert session.stats.present_bytes > 0
            return session.cache.nbytes + session.stats.policy_bytes + session.stats.present_bytes

    assert taken(changed.tokens) <= changed.allowed < taken(whole.tokens)


def test_an_interrupt_does_not_wait_for_work_in_progress():
    sleeper = partial(SimpleNamespace, perform=time.sleep)
    results = in_processes(2, sleeper(), sleeper, [0, 0, 60, 60])
    next(results)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)
    assert time.monotonic() - began < 5


def answers(model, policy, case, questions):
    """Token ids of each answer of one session that watched the stream."""
    budget = 64 if POLICIES[policy].bounded else 256
    with Session.open(model, policy=policy, budget=budget, append="all") as session:
        for frame in case.frames:
            session.watch(frame)
        return [session.ask(question).token_ids for question in questions]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_no_answer_is_affected_by_the_questions_before_it(demo, policy):
    """InfiniPot-V, App. C."""
    case = make_case(seed_words("0"), 2, 16)
    first, second = [question.text for question in case.questions if not question.is_about_now][:2]
    assert answers(demo, policy, case, [first, second])[1] == answers(demo, policy, case, [second])[0]
