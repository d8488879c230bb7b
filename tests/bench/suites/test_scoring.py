"""Scores against values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.bench.suites.scoring import Scores, edit_distance, marks_of, mean, nearest

LABELS = ["blow dry", "put on the cap", "spread the slurry"]


def record(scoring, response, answer, **more):
    return {
        "scoring": scoring,
        "response": response,
        "answer": answer,
        "options": ["red", "a hat", "no"],
        "error": None,
        **more,
    }


@pytest.mark.parametrize(
    ("scoring", "response", "answer", "marks"),
    [
        ("first-letter", " B. because", "B", (True,)),
        ("first-letter", "The answer is B", "B", (False,)),
        ("first-letter", "", "B", (False,)),
        ("letter-within", "I say B", "B", (True,)),
        ("letter-within", "because", "B", (False,)),
        ("letter-within", "Because", "B", (True,)),  # as the benchmark's own program has it
        ("digits", "They did it 1 and 2 times", "12", (True,)),
        ("digits", "They did it 2 times", "12", (False,)),
        ("digits", "twice", "2", (False,)),
        ("yes-no", "Yes, it is", "Yes", (True,)),
        ("yes-no", "Y", "Yes", (True,)),
        ("yes-no", "yes", "Yes", (False,)),
        ("yes-no", "No", "Yes", (False,)),
        ("judge", "anything", "right", None),
    ],
)
def test_one_answer(scoring, response, answer, marks):
    assert marks_of(record(scoring, response, answer)) == marks


@pytest.mark.parametrize(
    ("triggered", "response", "right"),
    [
        (10.0, "A Square.", True),
        (8.0, "square", True),
        (12.0, "square", True),
        (12.5, "square", False),
        (7.0, "square", False),
        (10.0, "squares", False),
        (None, "square", False),
    ],
)
def test_a_proactive_answer_is_in_its_window_and_holds_the_output(triggered, response, right):
    assert marks_of(record("proactive", response, "square", triggered_s=triggered, due_s=10.0)) == (right,)


def recursive_distance(a, b):
    """Levenshtein's, by its definition."""
    if not a or not b:
        return len(a) + len(b)
    cut = recursive_distance(a[1:], b[1:])
    return cut if a[0] == b[0] else 1 + min(cut, recursive_distance(a[1:], b), recursive_distance(a, b[1:]))


@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_edit_distance_is_what_its_definition_says(a, b):
    assert edit_distance(a, b) == recursive_distance(a, b)


@given(st.text("ab ", max_size=6), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
def test_the_nearest_label_is_nearest_of_all(text, labels):
    assert nearest(text, labels) == min((edit_distance(text, label), label) for label in labels)[1]


def answer(video, category, subtask, *right, **more):
    """A record whose marks are ``right``: one a step."""
    said = "\n".join("x" if each else "y" for each in right)
    about = {"video": video, "category": category, "subtask": subtask}
    return {**about, "scoring": "steps", "response": said, "answer": "\n".join("x" * len(right)), "options": ["x", "y"], **more}


def test_shares_count_marks_and_means_count_tasks():
    rows = [answer("v1", "x", "a", True), answer("v1", "x", "a", False), answer("v2", "x", "b", True, True, False)]
    rows += [answer("v3", "y", "c", error="no room"), answer("v2", "y", "c", True, rating=4.0)]
    scores = Scores(rows)
    b, a = scores.subtasks(["b", "a"], "x")
    assert (b["column"], a["column"]) == ("b", "a")
    assert (b["accuracy"], a["accuracy"]) == (2 / 3, 1 / 2)
    assert scores.accuracy("x", "x")["accuracy"] == 3 / 5
    assert mean("m", [a, b])["accuracy"] == (2 / 3 + 1 / 2) / 2
    assert (scores.accuracy("all")["videos"], scores.accuracy("all")["questions"]) == (2, 6)
    assert (
        scores.accuracy("none", subtask="d")["accuracy"]
        is mean("m", [scores.accuracy("none", subtask="d")])["accuracy"]
        is None
    )
    assert scores.rating("r", "y")["rating"] == 4.0
