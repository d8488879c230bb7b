"""Several questions to one memory: no answer depends on the questions before it (InfiniPot-V, App. C)."""

import pytest

from edgevlm.calib.accuracy.cases import make_case, seed_words
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.session import Session

CASE = make_case(seed_words("0"), 2, 16)


def answers(model, policy, questions):
    """Token ids of each answer of one session that watched the stream."""
    budget = 64 if POLICIES[policy].bounded else 256
    with Session.open(model, policy=policy, budget=budget, append="all") as session:
        for frame in CASE.frames:
            session.watch(frame)
        return [session.ask(question).token_ids for question in questions]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_no_answer_is_affected_by_the_questions_before_it(demo, policy):
    first, second = [question.text for question in CASE.questions if not question.is_about_now][:2]
    assert answers(demo, policy, [first, second])[1] == answers(demo, policy, [second])[0]
