"""Every JSON line of a run is as its schema says, and the schema names every field."""

import json
import re
from dataclasses import fields
from datetime import datetime, timedelta, timezone

import jsonschema
import pytest
from typer.testing import CliRunner

from edgevlm.apps.run.events import SCHEMA, SCHEMAS, AnswerEvent, StatsEvent
from edgevlm.cli import app

COUNT = "how many objects are there now?"


def run(*arguments):
    done = CliRunner().invoke(app, ["run", "--threads", "1", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done


@pytest.mark.parametrize("arguments", [["--frames", 40], ["--frames", 60, "--policy", "rekv", "--ask", COUNT]])
def test_lines_are_as_their_schema_says(arguments):
    lines = [json.loads(line) for line in run("--json", *arguments).stdout.splitlines()]
    assert {line["event"] for line in lines} >= {"answer", "summary"}
    for line in lines:
        jsonschema.validate(line, SCHEMAS[line["event"]], cls=jsonschema.Draft202012Validator)
        written = datetime.fromisoformat(line["time"].replace("Z", "+00:00"))
        assert abs(datetime.now(timezone.utc) - written) < timedelta(minutes=1)
    assert ("store" in lines[-1]) == ("rekv" in arguments)


def test_the_schema_names_every_field():
    common = {"event", "schema", "time"}
    assert SCHEMAS["answer"]["properties"].keys() == common | {field.name for field in fields(AnswerEvent)} - {"others"}
    assert SCHEMAS["stats"]["properties"].keys() == common | {field.name for field in fields(StatsEvent)}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["properties"]["schema"]["const"] == SCHEMA


def test_quiet_leaves_answers_alone():
    done = run("--frames", 20, "--ask", COUNT, "--quiet")
    assert re.fullmatch(rf"\[10\.0 s\] {re.escape(COUNT)}  \d   \(truth: \d\)\n", done.stdout)
    assert done.stderr == ""


def test_text_has_statistics_where_they_are_asked_for(monkeypatch):
    shown = run("--realtime", "--seconds", 1.2, "--stats-every", 0.3).stderr.splitlines()
    assert sum(line.startswith("running · ") for line in shown) >= 2
    assert not any(line.startswith("running · ") for line in run("--realtime", "--seconds", 1.2).stderr.splitlines())
