"""Every policy through the command, on the demo: it keeps within the budget and answers."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.policies import POLICIES

COUNT = "how many objects are there now?"
FRAMES, PER_FRAME = 40, 16


def run(policy, budget):
    command = ["run", "--policy", policy, "--budget", str(budget), "--frames", str(FRAMES), "--ask", COUNT, "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--append", "all", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.bounded])
def test_a_policy_keeps_within_256_tokens_and_answers(policy):
    *events, summary = run(policy, 256)
    (answer,) = (event for event in events if event["event"] == "answer")
    assert answer["token_ids"]
    assert answer["text"]
    assert (summary["event"], summary["frames"]) == ("summary", FRAMES)
    if policy == "simple-stream":
        assert summary["cache_tokens"] == 4 * PER_FRAME, "whatever the budget"
    else:
        assert 256 - 9 * PER_FRAME < summary["cache_tokens"] <= 256, "a compression makes room for a chunk of 8, and no more"
    assert summary["compressions"] > 0


def test_full_keeps_all_that_its_budget_declares_and_then_ends():
    *_, summary = run("full", FRAMES * PER_FRAME)
    assert (summary["cache_tokens"], summary["compressions"]) == (FRAMES * PER_FRAME, 0)
    with pytest.raises(UserError, match="the full cache is full: 256 tokens hold 16 frames"):
        run("full", 256)
