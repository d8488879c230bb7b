"""The long run: visitors do not meet, their questions have one answer, and a line says what each mark took."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench.memory import longrun
from edgevlm.bench.memory.longrun import measure, plan, questions
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.taught import parse

MARKS = (200, 500)


@pytest.mark.parametrize("seed", range(3))
def test_visitors_have_left_at_their_mark_and_no_two_are_alike(seed):
    world, asked = plan(seed, (1_000, 10_000, 100_000))
    assert [len(visits) for visits in asked.values()] == sorted(len(visits) for visits in asked.values())
    assert len({(visit.color, visit.shape) for visit in world.visits}) == len(world.visits) > 30
    for one, other in zip(world.visits, world.visits[1:], strict=False):
        assert one.leaves < other.enters
    for mark, visits in asked.items():
        assert all(visit.leaves <= mark - 30 for visit in visits)
    gaps = [100_000 - visit.leaves for visit in asked[100_000]]
    assert min(gaps) < 100
    assert max(gaps) >= 40_000


def test_questions_are_answered_by_what_was_shown():
    world, asked = plan(1, MARKS)
    shown = {}
    for frame in range(MARKS[0]):
        world.step()
        shown |= {(thing.color, thing.shape): (frame, thing.quadrant) for thing in world.history.present}
    made = questions(world, asked[MARKS[0]], np.random.default_rng(0))
    assert len([gap for _, _, gap in made if gap]) == 2 * len(asked[MARKS[0]]) > 4
    for text, answer, gap in made:
        question = parse(text)
        pair = question.color, question.shape
        if gap is None:
            assert answer == "no"
            assert pair not in shown
        elif gap:
            frame, quadrant = shown[pair]
            assert gap == MARKS[0] - 1 - frame
            assert answer == "yes" if question.kind == "past_seen" else answer.split()[0] == ("top", "bottom")[quadrant // 2]


@pytest.mark.parametrize("policy", ["rekv", "last-seen"])
def test_a_line_a_mark(policy, monkeypatch):
    monkeypatch.setattr(longrun, "REPORT_EVERY", 100)
    lines = list(measure(policy, 128, MARKS, 0, "all", "all", 1_000_000, 4_000_000))
    assert [line["frames_done"] for line in lines if "frames_done" in line] == [*range(100, 501, 100)]
    first, last = (line for line in lines if "frames" in line)
    assert first["device_bytes"] == last["device_bytes"], "flat"
    assert last["frames"] == 500
    assert last["right"]["now"] in ("2/2", "3/3")
    assert 0 <= last["backward"] <= 1
    if policy == "rekv":
        assert first["moved_bytes_per_question"] > 0
        assert 0 < last["host_bytes"] <= 1_000_000
        assert 0 < last["file_bytes"] <= 4_000_000
        assert last["lost"] > first["lost"], "the file is a ring"
        assert last["merged"] > 0
    else:
        assert (last["moved_bytes_per_question"], last["host_bytes"], last["file_bytes"]) == (0, 0, 0)


def test_the_command_prints_lines_and_refuses_what_is_no_policy():
    typed = ["bench", "memory", "longrun", "--frames", "200", "--budget", "128", "--policy", "last-seen",
             "--append", "all,changed:tau=0.9,refresh=0"]  # fmt: skip
    done = CliRunner().invoke(app, [*typed, "--json"], catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        assert (line["bench"], line["policy"], line["frames"], line["ttft_ratio"]) == ("longrun", "last-seen", 200, 1.0)
    assert [(line["append"], line["appended"] < 0.5) for line in lines] == [("all", False), (typed[-1].split(",", 1)[1], True)]
    page = CliRunner().invoke(app, typed[:-2], catch_exceptions=False).stdout
    assert "ttft ms p50" in page
    assert "now 3/3" in page or "now 2/2" in page
    with pytest.raises(UserError, match="unknown policy 'nothing'"):
        CliRunner().invoke(app, ["bench", "memory", "longrun", "--policy", "nothing"], catch_exceptions=False)
