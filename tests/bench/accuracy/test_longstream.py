"""The suite of long streams: its answers are the world's, its ages are frames, its bytes equal, its work resumable."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench.accuracy.report import gap_name
from edgevlm.calib.accuracy.cases import make_case, seed_words
from edgevlm.calib.demo.world import LongWorld, plan_visits
from edgevlm.cli import app
from edgevlm.runtime.taught import parse

FRAMES = 420
WORDS = seed_words("3")


def shown(stream):
    """Token -> (colour, shape), by walking the world again; and all pairs ever shown."""
    rng, seen = np.random.default_rng([*WORDS, stream, 1]), {}
    world = LongWorld([*WORDS, stream], plan_visits(rng, FRAMES))
    for frame in range(FRAMES):
        world.step()
        seen |= {frame * 16 + thing.cell: (thing.color, thing.shape) for thing in world.history.present}
    return seen


@pytest.mark.parametrize("stream", range(3))
def test_answers_and_evidence_are_those_of_the_world(stream):
    case, seen = make_case(WORDS, stream, FRAMES, "longstream"), shown(stream)
    ages = set()
    for question in case.questions:
        if question.is_about_now or question.kind.startswith("first_"):
            continue
        asked = parse(question.text)
        fits = [at for at, (color, shape) in seen.items() if asked.shape == shape and asked.color in (None, color)]
        assert question.evidence.tolist() == sorted(fits)
        assert (question.answer == "no") == (not fits)
        if fits:
            assert len({seen[at] for at in fits}) == 1, "one answer"
            assert case.gap(question) == FRAMES - 1 - max(fits) // 16
        ages.add(gap_name(case.gap(question)))
    assert ages == {"tens", "hundreds", None}
    kinds = {question.kind for question in case.questions}
    assert kinds >= {"past_color", "past_where", "past_seen", "first_color", "now_count"}


def test_the_command_goes_on_with_its_journal_and_gives_equal_bytes(tmp_path):
    typed = [
        "bench", "accuracy", "--suite", "longstream", "--frames", "105", "--budget", "128", "--against", "sliding-window",
        "--policy", "sliding-window,hybrid", "--out", str(tmp_path / "run.jsonl"), "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*typed, "--streams", "1"], catch_exceptions=False)
    assert done.exit_code == 0
    before = (tmp_path / "run.jsonl").read_text()
    again = CliRunner().invoke(app, [*typed, "--streams", "1", "--resume"], catch_exceptions=False)
    assert again.stdout == done.stdout
    assert (tmp_path / "run.jsonl").read_text() == before, "nothing was done twice"
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    of = {line["policy"]: line for line in lines if line["kind"] == "backward"}
    assert set(of) == {"oracle", "sliding-window", "hybrid"}
    allowed = of["sliding-window"]["bytes"]
    assert 0.9 * allowed < of["hybrid"]["bytes"] <= allowed
    assert of["hybrid"]["moved"] > 0 == of["sliding-window"]["moved"]
    assert of["oracle"]["accuracy"] == 1
