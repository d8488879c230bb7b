"""The bench of a frame's way: the stages that it names, in order, for each kind of source."""

import json

from typer.testing import CliRunner

from edgevlm.bench.camera import STAGES
from edgevlm.cli import app

FIELDS = ["bench", "schema", "source", "stage", "ms_p50", "ms_p95", "frames", "model", "threads", "realtime"]


def bench(*arguments):
    command = ["bench", "camera", "--threads", "1", "--no-realtime", *map(str, arguments)]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def test_stages_of_the_demo():
    lines = [json.loads(line) for line in bench("--frames", 3, "--json").stdout.splitlines()]
    assert [line["stage"] for line in lines] == [stage for stage in STAGES if stage != "decode"]
    for line in lines:
        assert list(line) == FIELDS
        assert (line["bench"], line["source"], line["frames"]) == ("camera", "demo", 3)
        assert line["ms_p95"] >= line["ms_p50"] >= 0
    by_stage = {line["stage"]: line["ms_p50"] for line in lines}
    assert by_stage["encode"] > 0
    assert by_stage["total"] >= max(by_stage["answer"], by_stage["busy"])
