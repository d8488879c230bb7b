"""`edgevlm bench report --baseline`: which lines belong together, what is worse, and what must not be compared."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.bench.results.compare import compare
from edgevlm.bench.results.journal import read_runs, runs_of
from edgevlm.cli import app
from edgevlm.errors import UserError

MACHINE = {"cpu": "one", "cores": 2}
DECODE = {
    "bench": "decode",
    "runtime": "edgevlm",
    "model": "m",
    "precision": "fp32",
    "context": 300,
    "threads": 1,
    "kv": "fp32",
}


def run_of(*lines, machine=None, name="run"):
    return runs_of([{"event": "run", "id": name, "machine": machine or MACHINE}, *({"run": name, **x} for x in lines)], "-")[0]


def decode(ms, low=None, high=None, **more):
    return {**DECODE, "ms_per_token": ms, "low": low or ms, "high": high or ms, **more}


def failing(new, old, margin=0.2):
    return [change["field"] for change in compare(run_of(*new), run_of(*old), margin) if change["verdict"] == "worse"]


def test_worse_by_more_than_the_margin_with_spreads_well_apart():
    assert failing([decode(13.0, 12.9, 13.1)], [decode(10.0, 9.8, 10.2)]) == ["ms_per_token"]
    assert failing([decode(13.0, 12.5, 13.5)], [decode(10.0, 9.0, 11.0)]) == [], "quartiles of few rounds are too narrow"
    assert failing([decode(11.9)], [decode(10.0)]) == []
    assert failing([decode(8.0)], [decode(13.0)]) == []


def test_lines_are_matched_by_subject_and_not_by_order():
    new = [decode(10.0), decode(20.0, threads=2), decode(7.0, model="new")]
    old = [decode(20.0, threads=2), decode(10.0), decode(7.0, kv="fp16"), decode(7.0, kv="int8")]
    assert [change["times_worse"] for change in compare(run_of(*new), run_of(*old), 0.2)] == [1.0, 1.0]


def test_machines_and_runs_without_a_common_line_are_refused():
    other = run_of(decode(1.0), machine={"cpu": "two", "cores": 2})
    with pytest.raises(UserError, match="cpu: one and two"):
        compare(run_of(decode(1.0)), other, 0.2)
    assert compare(run_of(decode(1.0)), other, 0.2, force=True)
    with pytest.raises(UserError, match="has no machine description"):
        compare(run_of(decode(1.0)), runs_of([decode(1.0)], "-")[0], 0.2)
    with pytest.raises(UserError, match="no lines in common"):
        compare(run_of(decode(1.0)), run_of({"bench": "stream", "fps": 1.0}), 0.2)


def write(path, *lines, name="run"):
    header = {"event": "run", "id": name, "machine": MACHINE}
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (header, *({"run": name, **line} for line in lines)))
    return str(path)


def report(*arguments):
    return CliRunner().invoke(app, ["bench", "report", *arguments])


def test_the_command(tmp_path):
    old = write(tmp_path / "old.jsonl", decode(10.0))
    new = write(tmp_path / "new.jsonl", decode(15.0))
    write(tmp_path / "new.jsonl", decode(10.5), name="later")
    assert report(new, "--baseline", old).exit_code == 0
    done = report(f"{new}#run", "--baseline", old)
    assert done.exit_code == 1
    row = done.stdout.splitlines()[1]
    assert row.split()[:5] == ["1.5", "ms_per_token", "15", "10", "worse"]
    assert "bench decode context 300 kv fp32 model m precision fp32 runtime edgevlm threads 1" in row
    assert report(f"{new}#run", "--baseline", old, "--fail-over", "60%").exit_code == 0
    line = json.loads(report(f"{new}#run", "--baseline", old, "--json").stdout)
    assert (line["times_worse"], line["verdict"]) == (1.5, "worse")
    single = write(tmp_path / "single.jsonl", {"bench": "accuracy", "policy": "h2o", "ttft_ms": 3.0})
    slower = write(tmp_path / "slower.jsonl", {"bench": "accuracy", "policy": "h2o", "ttft_ms": 4.5})
    done = report(slower, "--baseline", single)
    assert (done.exit_code, "1 slower by more than 20%, but measured once" in done.stderr) == (0, True)
    with pytest.raises(UserError, match="run nothing not found; choose from run, later"):
        read_runs([f"{new}#nothing"])
