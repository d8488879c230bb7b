"""The bench of products: what its lines compare."""

import json

from typer.testing import CliRunner

from edgevlm.cli import app


def test_each_layout_beside_float32():
    command = ["bench", "speed", "products", "--model", "demo", "--tokens-per-frame", "3"]
    done = CliRunner().invoke(app, [*command, "--rounds", "1", "--json"], catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ours = ["int8 blocks", "int4 blocks", "int8 columns"]
    assert [line["layout"] for line in lines] == [*(["fp32", *ours, "read", *ours]) * 12]
    assert [line["rows"] for line in lines] == [*([1] * 8 + [3] * 8 + [6] * 8) * 4]
    assert all(line["ratio"] > 0 for line in lines if line.get("against") == "fp32")
