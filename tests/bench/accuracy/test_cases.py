"""Evidence is looked for in the pixels' own history: which patches showed what, frame by frame."""

import numpy as np
import pytest

from edgevlm.calib.accuracy.cases import DEVELOPMENT, TEST_SEEDS, make_case, seed_words
from edgevlm.calib.demo.world import World
from edgevlm.errors import UserError
from edgevlm.runtime.taught import COLORS, SHAPES

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


def test_seeds_for_reports_are_never_those_of_development():
    assert seed_words("test") == TEST_SEEDS
    assert {seed_words(str(seed))[0] for seed in (0, 7, 3_000_000)} == {DEVELOPMENT}
    assert TEST_SEEDS[0] != DEVELOPMENT
    for text in ("-1", "x", ""):
        with pytest.raises(UserError, match="give an integer from 0"):
            seed_words(text)


def test_h264_loses_more_at_a_higher_rate_factor():
    sent = make_case(seed_words("3"), 0, 8).frames.astype(float)
    lost = [np.abs(make_case(seed_words("3"), 0, 8, crf=crf).frames - sent).mean() for crf in (0, 23, 40)]
    assert 0 < lost[0] < lost[1] < lost[2] < 32, "4:2:0 loses colour at every rate; the frames are the same ones in order"
