"""The bench of products: what its lines compare."""

import json

from typer.testing import CliRunner

from edgevlm.cli import app
from edgevlm.runtime import kernels


def test_each_layout_beside_float32():
    command = ["bench", "speed", "products", "--model", "demo", "--tokens-per-frame", "3"]
    done = CliRunner().invoke(app, [*command, "--rounds", "1", "--json"], catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ours = ["int8 blocks", "int4 blocks", "int8 columns"]
    more = ["int4 extension"] * kernels.multiplies_codes()
    layer = ["fp32", *ours, *more, "read", *ours, *more, *more]
    assert [line["layout"] for line in lines] == [*["fp32", *ours, "read", *ours] * 12, *layer * 3]
    assert [line["rows"] for line in lines] == [
        row for count in (*[8] * 4, len(layer)) for row in (1, 3, 6) for _ in range(count)
    ]
    assert all(line["ratio"] > 0 for line in lines if line.get("against") == "fp32")
