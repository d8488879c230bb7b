"""``edgevlm bench store``: it measures all that it names, and leaves nothing."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.bench.store import Tiers
from edgevlm.cli import app
from edgevlm.errors import UserError

TYPED = ["bench", "store", "--clusters", "600", "--asked", "40", "--rounds", "2"]


@pytest.mark.parametrize("typed", [[], ["--json"]])
def test_it_measures_and_leaves_nothing(tmp_path, typed):
    done = CliRunner().invoke(app, [*TYPED, *typed, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    if not typed:
        assert "a read a row / a read a cluster" in done.stdout
        return
    line = json.loads(done.stdout)
    assert line["bench"] == "store"
    assert set(line) == {"bench", *Tiers.__slots__}
    assert all(line[name] > 0 for name in Tiers.__slots__)
    assert line["bytes"] == 32 * 2 * (4 * 64 + 20)


def test_no_more_is_asked_for_than_there_is(tmp_path):
    done = CliRunner().invoke(app, ["bench", "store", "--clusters", "10", "--asked", "40"])
    assert isinstance(done.exception, UserError)
