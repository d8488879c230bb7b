"""Several questions to one memory: no answer changes, and the comparison notices when one does."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from edgevlm.bench.accuracy.report import describe_turns, turn_rows
from edgevlm.calib.accuracy.cases import make_case, seed_words
from edgevlm.calib.accuracy.compare import Comparison
from edgevlm.calib.accuracy.variants import Budget, Variant, VariantRun
from edgevlm.calib.accuracy.worker import GUIDED, AccuracySettings, CaseTask, Worker, draw_turns, take_turns
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.policies.baselines import Full
from edgevlm.runtime.stream import Stream

CASE = make_case(seed_words("0"), 2, 16)


def turns(demo, name, budget=64, count=5):
    return take_turns(demo, CASE, lambda: create_policy(name), budget, "lazy", count, [1])["turns"]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != GUIDED])
def test_no_answer_is_affected_by_the_questions_before_it(demo, name):
    found = turns(demo, name, budget=64 if POLICIES[name].bounded else 256, count=2)
    assert len(found) == 2
    assert all(turn["same"] and turn["right"] == turn["fresh"] for turn in found)


def test_a_question_that_empties_the_memory_is_noticed(demo, monkeypatch):
    question = Stream.question

    @contextmanager
    def forgetful(self, *pending):
        with question(self, *pending):
            yield
        self.cache.evict([self.cache.kind(layer) == Kind.PREFIX for layer in range(self.cache.layers)])

    monkeypatch.setattr(Stream, "question", forgetful)
    found = turns(demo, "full", budget=256)
    assert found[0]["same"], "the first has none before it"
    assert not all(turn["same"] for turn in found)


def test_the_guided_policy_holds_the_stream_and_is_left_its_share(monkeypatch):
    made = []

    @dataclass
    class Guided(Full):
        target: float = 0.5

        def attach(self, budget, shape):
            made.append((budget, self.target))
            super().attach(budget, shape)

    monkeypatch.setitem(POLICIES, GUIDED, Guided)
    worker = Worker(AccuracySettings(frames=8, turns=2))
    (run,) = worker.runs([Variant(GUIDED)], Budget("25%", 0.25))
    record = worker.perform(CaseTask(run, 0))
    assert (run.label, run.tokens) == (GUIDED, 32)
    assert made == [(128, 0.25)] * 3, "one session for all turns, and one for each"
    assert [turn["same"] for turn in record["turns"]] == [True, True], "this one keeps everything"


def test_questions_about_before_are_chosen_first():
    chosen = draw_turns(CASE, 5, [3])
    before = sum(not question.is_about_now for question in CASE.questions)
    assert sum(not question.is_about_now for question in chosen) == min(5, before)
    assert len({id(question) for question in chosen}) == 5
    assert [q.text for q in draw_turns(CASE, 5, [3])] == [q.text for q in chosen]


def test_rows_of_planted_turns():
    def turn(right, fresh, same, kind="first_color"):
        return {"kind": kind, "right": right, "fresh": fresh, "same": same}

    full, run = VariantRun("full", "100%", 256), VariantRun("guided", "25%", 64)
    by_run = {
        full: [{"turns": [turn(True, True, True), turn(True, True, True), turn(False, False, True, "before")]}] * 4,
        run: [
            {"turns": [turn(True, True, True), turn(s > 2, True, s > 1), turn(False, False, False, "before")]} for s in range(4)
        ],
    }
    outcome = Comparison(AccuracySettings(turns=3), [full, run], [], by_run)
    rows = {(row.policy, row.turn): row for row in turn_rows(outcome)}
    assert set(rows) == {("full", 1), ("full", 2), ("guided", 1), ("guided", 2)}, "full KV fails the third's kind"
    second = rows["guided", 2].line(outcome)
    assert (second["kind"], second["accuracy"], second["fresh"], second["changed"]) == ("turn2", 0.25, 1.0, 2)
    assert describe_turns(outcome, list(rows.values())).splitlines()[-1].split() == [
        "guided",
        "25%",
        "1.000",
        "0.250",
        "-",
        "1.000",
        "2",
    ]
