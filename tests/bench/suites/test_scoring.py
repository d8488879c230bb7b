"""Scores against values worked out by hand."""

import pytest

from edgevlm.bench.suites.scoring import Scores, is_right, mean


def record(scoring, response, answer, **more):
    return {"scoring": scoring, "response": response, "answer": answer, "error": None, **more}


@pytest.mark.parametrize(
    ("scoring", "response", "answer", "right"),
    [
        ("first-letter", " B. because", "B", True),
        ("first-letter", "The answer is B", "B", False),
        ("first-letter", "", "B", False),
        ("letter-within", "I say B", "B", True),
        ("letter-within", "because", "B", False),
        ("letter-within", "Because", "B", True),  # as the benchmark's own program has it
        ("digits", "They did it 1 and 2 times", "12", True),
        ("digits", "They did it 2 times", "12", False),
        ("digits", "twice", "2", False),
        ("yes-no", "Yes, it is", "Yes", True),
        ("yes-no", "Y", "Yes", True),
        ("yes-no", "yes", "Yes", False),
        ("yes-no", "No", "Yes", False),
    ],
)
def test_one_answer(scoring, response, answer, right):
    assert is_right(record(scoring, response, answer)) is right


@pytest.mark.parametrize(
    ("triggered", "response", "right"),
    [
        (10.0, "A Square.", True),
        (8.0, "square", True),
        (12.5, "square", False),
        (7.0, "square", False),
        (10.0, "squares", False),
        (None, "square", False),
    ],
)
def test_a_proactive_answer_is_in_its_window_and_holds_the_output(triggered, response, right):
    assert is_right(record("proactive", response, "square", triggered_s=triggered, due_s=10.0)) is right


def test_fractions_count_answers_and_means_count_tasks():
    def answer(video, category, subtask, right, **more):
        about = {"video": video, "category": category, "subtask": subtask}
        return {**record("letter-within", "B" if right else "A", "B"), **about, **more}

    rows = [answer("v1", "x", "a", True), answer("v1", "x", "a", False)]
    rows += [answer("v2", "x", "b", right) for right in (True, True, False)]
    scores = Scores([*rows, answer("v3", "y", "c", True, error="no room"), answer("v2", "y", "c", True)])
    b, a = scores.subtasks(["b", "a"], "x")
    assert (b["column"], a["column"]) == ("b", "a")
    assert (b["accuracy"], a["accuracy"]) == (2 / 3, 1 / 2)
    assert scores.accuracy("x", "x")["accuracy"] == 3 / 5
    assert mean("m", [a, b])["accuracy"] == (2 / 3 + 1 / 2) / 2
    assert (scores.accuracy("all")["videos"], scores.accuracy("all")["questions"]) == (2, 6)
    none = scores.accuracy("none", subtask="d")
    assert none["accuracy"] is mean("m", [none])["accuracy"] is None
