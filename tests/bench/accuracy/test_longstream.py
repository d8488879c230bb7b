"""The suite of long streams: its answers are the world's, its ages are frames, its bytes equal, its work resumable."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench.accuracy.report import gap_name, report_lines
from edgevlm.calib.accuracy.cases import make_case, seed_words
from edgevlm.calib.accuracy.compare import Comparison
from edgevlm.calib.accuracy.variants import VariantRun
from edgevlm.calib.accuracy.worker import CEILING, AccuracySettings
from edgevlm.calib.demo.questions import parse
from edgevlm.calib.demo.world import LongWorld, plan_visits
from edgevlm.cli import app

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
    assert {question.kind for question in case.questions} >= {
        "past_color",
        "past_where",
        "past_seen",
        "first_color",
        "now_count",
    }


def result(kind, right, gap, moved=0):
    return {"kind": kind, "right": right, "gap": gap, "quarter": 1, "held": 0.5, "any": 1.0, "ttft_ms": 2.0, "moved": moved}


def test_rows_are_by_how_long_ago_and_what_never_was_is_apart():
    def records(right):
        results = [result("past_seen", right, 20), result("past_seen", not right, 200), result("past_color", right, 2000, 6000)]
        results += [result("past_seen", True, None), result("now_count", True, 0)]
        return [{"tokens": 256, "compress_ms": 4.0, "compressions": 3, "bytes": 1000, "results": results} for _ in range(4)]

    perfect = [{**record, "results": [{**each, "right": True} for each in record["results"]]} for record in records(True)]
    ours, theirs = VariantRun("ours", "256", 256, 2000), VariantRun("theirs", "256", 250, 2000)
    by_run = {CEILING: perfect, ours: records(True), theirs: records(False)}
    comparison = Comparison(AccuracySettings(suite="longstream", frames=3000), list(by_run), [], by_run)
    rows = {line["kind"]: line for line in report_lines(comparison, "theirs") if line["policy"] == "ours"}
    found = {kind: (row["accuracy"], row["questions"]) for kind, row in rows.items()}
    assert {kind: of for kind, of in found.items() if kind.startswith(("backward", "unseen"))} == {
        "backward": (pytest.approx(2 / 3, abs=1e-4), 12), "backward/tens": (1.0, 4), "backward/hundreds": (0.0, 4),
        "backward/thousands": (1.0, 4), "unseen": (1.0, 4),
    }  # fmt: skip
    assert rows["backward/hundreds"]["difference"] == -1
    assert rows["backward/thousands"]["moved"] == 6000
    assert rows["past_seen"]["questions"] == 8


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
