"""Every line that ``--json`` prints is as its published schema says."""

import json
import runpy
import shutil
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from edgevlm.apps.schemas import schemas
from edgevlm.bench.schemas import bench_schema
from edgevlm.cli import app
from edgevlm.runtime.model import bundle_folder

DOCS = Path(__file__).parents[2] / "docs"
COUNT = "how many objects are there now?"
WATCH = ["run", "--threads", "1"]
CALIBRATE = ["calibrate", "demo", "--frames", "16", "--budget", "64", "--policies", "h2o"]
ACCURACY = "accuracy --suite streamqa --frames 32 --streams 2 --budget 25% --policy=sliding-window,oracle"
BENCH = [
    "compression --layers 2 --tokens 256 --rounds 1", "memory snapshot --rounds 1 --policy h2o",
    "camera --frames 2 --no-realtime", ACCURACY, "vrex",
]  # fmt: skip


@pytest.fixture
def say(tmp_path, monkeypatch):
    """The lines of a command; ``{folder}`` in an argument is a directory that holds a cache of bundles."""
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "bundles"))

    def say(*typed):
        arguments = [part.format(folder=tmp_path) for part in typed]
        done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code in (0, 1), done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    return say


VALIDATORS = {kind: jsonschema.Draft202012Validator(schema) for kind, schema in {**schemas(), "bench": bench_schema()}.items()}


def validate(line):
    VALIDATORS["bench" if "bench" in line else line["event"]].validate(line)


@pytest.mark.parametrize(
    ("typed", "kinds"),
    [
        ([*WATCH, "--frames", "40"], {"answer", "summary"}),
        ([*WATCH, "--frames", "60", "--policy", "rekv", "--ask", COUNT], {"answer", "summary"}),
        (["plan"], {"plan"}),
        (["models"], {"model"}),
        (["doctor"], {"finding"}),
        (["cameras"], {"camera"}),
        (["power", "--seconds", "0.1", "--interval", "0.05"], {"power"}),
        (["policies"], {"policy"}),
        (["policies", "auto"], {"policy"}),
        ([*CALIBRATE, "--out", "{folder}/it"], {"calibration", "candidate", "choice"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_lines_are_as_their_schema_says(say, typed, kinds):
    lines = say(*typed)
    assert {line["event"] for line in lines} >= kinds
    for line in lines:
        validate(line)


@pytest.mark.parametrize("typed", BENCH)
def test_measurements_are_as_their_schema_says(say, typed):
    lines = say("bench", *typed.split())
    assert lines
    for line in lines:
        validate(line)


def test_bundles_and_snapshots_are_as_their_schema_says(say, tmp_path):
    shutil.copytree(bundle_folder("demo"), tmp_path / "bundles" / "demo")
    (line,) = say("bundles", "list")
    validate(line)
    say(*WATCH, "--frames", "8", "--state", "{folder}/state")
    (tmp_path / "state" / "0000000000.snapshot").write_bytes(b"no snapshot")
    lines = say("state", "show", "{folder}/state")
    assert {line["usable"] for line in lines} == {True, False}
    for line in lines:
        validate(line)


def test_the_documents_are_made_from_the_schemas():
    made = runpy.run_path(str(DOCS / "reference.py"))
    again = "run python docs/reference.py"
    assert (DOCS / "reference" / "json.md").read_text() == made["json_lines"](), again
    assert (DOCS / "reference" / "http.md").read_text() == made["http"](), again
    for validator in VALIDATORS.values():
        validator.check_schema(validator.schema)
