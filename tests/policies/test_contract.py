"""What a policy of a user's own writes, and what is said where it does not do what it must."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from policies.filled import PREFIX, Filled, told
from typer.testing import CliRunner

from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import Policy, StreamShape, create_policy, layers_of

EXAMPLE = Path(__file__).parents[2] / "examples/coreset_policy.py"
LAYERS, BUDGET = 3, 16


def watched(policy, frames=9):
    """A stream of frames of four tokens; what is kept of it in each layer and head."""
    filled = Filled(LAYERS, BUDGET + 4, (2, 2), np.random.default_rng(0))
    policy.attach(BUDGET, StreamShape(LAYERS, 4, PREFIX))
    for _ in range(frames):
        if (plan := policy.before_append(filled.cache, 4, None)) is not None:
            filled.cache.evict(plan.keep)
        policy.after_append(layers_of(filled.cache), told(policy, filled.frame()))
    return filled.cache


@dataclass
class Oldest(Policy):
    def score(self, layer):
        return -layer.seq


def test_one_method_is_a_policy():
    cache = watched(Oldest())
    for layer in range(LAYERS):
        assert np.sort(cache.seq(layer)[0]).tolist() == [*range(PREFIX + BUDGET - 4), *range(PREFIX + 32, PREFIX + 36)]
        assert (cache.kind(layer) == Kind.PREFIX).sum(1).tolist() == [PREFIX, PREFIX], "nobody asked for it"
    assert (Oldest.name, create_policy.__module__) == ("Oldest", "edgevlm.runtime.policies")


def test_the_example_runs_from_its_file():
    policy = f"{EXAMPLE}:Centres:centres=32"
    asked = ["run", "--policy", policy, "--budget", "256", "--append", "all", "--frames", "24", "--json"]
    done = CliRunner().invoke(app, [*asked, "--ask", "how many objects are there now?"], catch_exceptions=False)
    *_, summary = map(json.loads, done.stdout.splitlines())
    assert done.exit_code == 0
    assert summary["compressions"] > 0
    for wrong, says in (("centres=0", "centres must be at least 1, not 0"), ("centers=1", "did you mean 'centres'")):
        with pytest.raises(UserError, match=says):
            create_policy(f"{EXAMPLE}:Centres:{wrong}")


class Keeps(Policy):
    """Keeps the oldest rows; ``change``: a layer, and what becomes of its mask."""

    name = "keeps"

    def __init__(self, change):
        self.change = change

    def compress(self, layer):
        keep = layer.fixed | layer.top(-layer.seq, layer.target)
        layer.keep(self.change[1](keep) if layer.index == self.change[0] else keep)


def one_more(mask):
    mask[1, np.flatnonzero(~mask[1])[0]] = True
    return mask


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((2, np.zeros_like), r"policy keeps: compress\(\) keeps too few rows: 0 in layer 2, KV head 0, not 12\b"),
        ((1, one_more), r"policy keeps: compress\(\) keeps too many rows: 13 in layer 1, KV head 1, not 12\b"),
        ((0, lambda mask: mask[:, 1:]), r"kept bool \[2, 18\] in layer 0, not a bool mask \[2, 19\]"),
        ((0, lambda mask: mask.astype(int)), r"kept int64 \[2, 19\]"),
        ((0, lambda mask: None), "kept nothing in layer 0"),
    ],
)
def test_a_policy_that_breaks_its_contract_is_told(change, says):
    with pytest.raises(UserError, match=says):
        watched(Keeps(change))


def test_a_policy_that_raises_is_one_line_with_its_place_and_snapshots_stay(tmp_path):
    mine = tmp_path / "mine.py"
    fails = "        [][0] if layer.seq.max() > 400 else 0\n"
    mine.write_text(EXAMPLE.read_text().replace("        return np.broadcast", f"{fails}        return np.broadcast"))
    line = next(number for number, text in enumerate(mine.read_text().splitlines(), 1) if "[][0]" in text)
    asked = ("run", "--policy", f"{mine}:Centres", "--budget", "256", "--append", "all", "--frames", "60")
    asked += ("--state", str(tmp_path / "state"), "--state-every", "0.01")
    with pytest.raises(UserError, match=rf"^policy Centres failed: {mine}, line {line}: IndexError: list index out of range"):
        CliRunner().invoke(app, asked, catch_exceptions=False)
    done = CliRunner().invoke(app, ["state", "show", str(tmp_path / "state"), "--json"], catch_exceptions=False)
    newest = json.loads(done.stdout.splitlines()[0])
    assert newest["usable"]
    assert 0 < newest["frames"] < 60
