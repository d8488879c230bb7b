"""``edgevlm bench memory store``: it measures all that it names, and leaves nothing."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.cli import app

TYPED = ["bench", "memory", "store", "--clusters", "600", "--asked", "40", "--rounds", "2"]


@pytest.mark.parametrize("typed", [[], ["--json"]])
def test_it_measures_and_leaves_nothing(tmp_path, typed):
    done = CliRunner().invoke(app, [*TYPED, *typed, "--directory", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    if not typed:
        assert done.stdout.split()[:2] == ["clusters", "asked"]
        return
    line = json.loads(done.stdout)
    assert line["bench"] == "store"
    assert all(line[name] > 0 for name in line if name != "bench")
    assert line["bytes"] == 32 * 2 * (4 * 64 + 24)
