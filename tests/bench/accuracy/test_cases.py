"""Evidence is looked for in the pixels' own history: which patches showed what, frame by frame."""

import numpy as np
import pytest

from edgevlm.calib.accuracy.cases import DEVELOPMENT, TEST_SEEDS, make_case, seed_words
from edgevlm.calib.demo.world import COLORS, SHAPES, World

FRAMES = 48


def shown(words, stream):
    """Token -> (colour, shape), by walking the world again."""
    world, seen = World([*words, stream]), {}
    for frame in range(FRAMES):
        world.step()
        for thing in world.history.things:
            if thing.left is None:
                seen[frame * 16 + thing.cell] = (COLORS[thing.color], SHAPES[thing.shape])
    return seen


@pytest.mark.parametrize("stream", range(6))
def test_evidence_is_where_the_answer_was_shown(stream):
    words = seed_words("3")
    case, seen = make_case(words, stream, FRAMES), shown(seed_words("3"), stream)
    kinds = set()
    for question in case.questions:
        tokens, text = set(question.evidence.tolist()), question.text
        kinds.add(question.kind)
        asked = [word for word in (*COLORS, *SHAPES) if word in text.split("?")[0].split()]
        newest = {token for token in seen if token // 16 == FRAMES - 1}
        among = newest if question.is_about_now else set(seen)
        if question.kind == "left_last":
            color, shape = question.answer.split()
            assert tokens == {token for token in seen if seen[token] == (color, shape)}
        elif question.kind.startswith("first_"):
            first = seen[min(seen)]
            assert tokens == {token for token in seen if seen[token] == first}
            assert question.answer in first
        else:
            assert tokens == {token for token in among if set(asked) <= set(seen[token])}
        assert question.last == (max(tokens) // 16 if tokens else None)
        assert (not tokens) == (question.answer in ("no", "0")), "only what never was has no evidence"
    assert len(kinds) >= 10


def test_quarters():
    case = make_case(seed_words("0"), 0, FRAMES)
    for question in case.questions:
        quarter = case.quarter(question)
        if question.last is None:
            assert quarter is None
        else:
            assert (quarter - 1) * FRAMES / 4 <= question.last < quarter * FRAMES / 4
    assert {case.quarter(question) for question in case.questions if question.is_about_now} <= {None, 4}


def test_a_case_is_always_the_same_and_streams_differ():
    one, again, other = (make_case(seed_words("5"), stream, 8) for stream in (1, 1, 2))
    np.testing.assert_array_equal(one.frames, again.frames)
    assert [(q.text, q.answer) for q in one.questions] == [(q.text, q.answer) for q in again.questions]
    assert not np.array_equal(one.frames, other.frames)


def test_the_hard_suite_has_the_same_questions_about_other_streams():
    plain, hard = (make_case(seed_words("5"), 1, 96, suite) for suite in ("streamqa", "streamqa-hard"))
    assert {q.kind for q in hard.questions} >= {"now_count", "past_where", "first_shape", "before"}
    assert hard.owners.max() > plain.owners.max(), "more happens"
    change = [np.abs(np.diff(case.frames.astype(int), axis=0)).mean() for case in (plain, hard)]
    assert change[1] > 1.3 * change[0], "the background moves"


def test_seeds_for_reports_are_never_those_of_development():
    assert seed_words("test") == TEST_SEEDS
    assert {seed_words(str(seed))[0] for seed in (0, 7, 3_000_000)} == {DEVELOPMENT}
    assert TEST_SEEDS[0] != DEVELOPMENT
    for text in ("-1", "x", ""):
        with pytest.raises(ValueError):  # noqa: PT011
            seed_words(text)
