"""`edgevlm bench all`: what is kept, what goes on, and what a stop or a failure leaves, with commands that are not benches."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from jetsons import Jetson
from typer.testing import CliRunner

from edgevlm.apps.commands.lazy import load_command
from edgevlm.bench.cli import COMMANDS
from edgevlm.bench.results import run_all as module
from edgevlm.bench.results.journal import lines_of, read_runs
from edgevlm.bench.results.run_all import run_all
from edgevlm.cli import app
from edgevlm.engines.devices.machine import Machine
from edgevlm.errors import UserError
from edgevlm.runtime.files import JsonLines

FAKE = """
import json, pathlib, sys, time
words = sys.argv[1:]
assert words[-1] == "--json"
with open("asked", "a") as asked:
    asked.write(words[0] + "\\n")
if words[0] == "bad":
    print(json.dumps({"bench": "bad", "ms": 1.0}), flush=True)
    print("edgevlm: no such model\\nhere: give another", file=sys.stderr)
    sys.exit(2)
print("not json")
for number in range(2):
    print(json.dumps({"bench": words[0], "nth": number, "ms": 2.0 + number}), flush=True)
if words[0] == "slow" and not pathlib.Path("quick").exists():
    time.sleep(60)
"""
PLANNED = [*module.QUICK.values(), *module.FULL.values()]
GOOD, BAD, SLOW = {"good": "good --x 'a b'"}, {"bad": "bad"}, {"slow": "slow"}


@pytest.fixture(autouse=True)
def fake(monkeypatch, tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "PROGRAM", [sys.executable, str(tmp_path / "fake.py")])
    monkeypatch.setattr(module, "QUICK", GOOD | BAD)
    monkeypatch.setattr(module, "FULL", GOOD)


def go(tmp_path, entries=GOOD | BAD, **options):
    said = []
    return run_all(tmp_path / "out", entries, said.append, **{"quick": True, **options}), said


def test_lines_of_each_command_behind_a_header_and_a_failure_does_not_end_it(tmp_path):
    run, said = go(tmp_path, BAD | GOOD)
    assert [line["nth"] for line in run.entries["good"].lines] == [0, 1]
    assert run.entries["good"].command == "edgevlm bench good --x 'a b' --json"
    assert run.entries["bad"].error == "here: give another"
    assert run.entries["bad"].lines == [{"bench": "bad", "ms": 1.0}]
    assert (run.entries["good"].seconds is None, run.entries["bad"].seconds) == (False, None)
    header = lines_of(tmp_path / "out")[0]
    assert header["versions"].keys() >= {"edgevlm", "python", "numpy", "onnxruntime"}
    assert header["machine"].keys() >= {"cpu", "governor", "kernel", "gpu", "device", "power_mode", "clocks_mhz", "memory_gb"}
    assert any("[2/2] edgevlm bench good" in text for text in said)


def test_the_same_command_goes_on_and_overwrites_nothing(tmp_path):
    go(tmp_path)
    before = (tmp_path / "out/results.jsonl").read_bytes()
    run, said = go(tmp_path)
    after = (tmp_path / "out/results.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)
    assert (tmp_path / "asked").read_text().split() == ["good", "bad", "bad"]
    assert "1 of 2 commands to do" in said[0]
    assert len(run.entries["bad"].lines) == 1
    assert len(read_runs([tmp_path / "out"])) == 1


def test_a_run_of_another_version_or_machine_is_not_added_to(tmp_path, monkeypatch):
    first, _ = go(tmp_path)
    with monkeypatch.context() as other:
        other.setattr(module, "__version__", "9.9")
        second, _ = go(tmp_path)
    third, _ = go(tmp_path, machine=Machine(Jetson(tmp_path / "jetson").root))
    assert len({first.id, second.id, third.id}) == 3


def test_ctrl_c_keeps_what_is_there_and_what_began_again_counts_once(tmp_path):
    script = textwrap.dedent(f"""
        import signal, sys
        from pathlib import Path
        from edgevlm.bench.results import run_all as module
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests' own parent ignores it
        module.PROGRAM = [sys.executable, {str(tmp_path / "fake.py")!r}]
        module.run_all(Path("out"), {{"slow": "slow"}}, print, quick=True)
    """)
    results = tmp_path / "out/results.jsonl"
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (results.exists() and results.read_bytes().count(b"\n") == 4):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) != 0
    run = read_runs([results])[0]
    assert [line["nth"] for line in run.entries["slow"].lines] == [0, 1]
    assert run.entries["slow"].seconds is None
    with results.open("ab") as file:
        file.write(b'{"bench": "torn')
    (tmp_path / "quick").write_text("")
    again, _ = go(tmp_path, SLOW)
    assert again.id == run.id
    assert len(again.entries["slow"].lines) == 2
    assert again.entries["slow"].seconds is not None
    assert b"torn" not in results.read_bytes()
    assert results.read_bytes().count(b'"nth": 0') == 2


def test_two_at_once_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    with JsonLines(tmp_path / "out/results.jsonl"), pytest.raises(UserError, match="another process is writing this file"):
        go(tmp_path)


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, ["bench", "all", "--quick", "--out", "out", "--only", "good"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "asked").read_text().split() == ["good"]
    done = CliRunner().invoke(app, ["bench", "all", "--quick", "--out", "out"])
    assert done.exit_code == 1
    assert "failed: edgevlm bench bad --json: here: give another" in done.stdout
    done = CliRunner().invoke(app, ["bench", "all", "--quick", "--plan"])
    assert done.stdout.splitlines()[0] == "edgevlm bench good --x 'a b' --json"
    done = CliRunner().invoke(app, ["bench", "all", "--quick", "--only", "best"])
    assert "--only best: choose from good, bad" in str(done.exception)


@pytest.mark.parametrize("text", PLANNED)
def test_every_planned_command_is_one_that_there_is(text):
    name, *arguments = shlex.split(text)
    load_command(name, COMMANDS[name][0]).make_context(name, [*arguments, "--json"])


def test_the_document_names_every_command():
    text = (Path(__file__).parents[3] / "docs/internals/benchmarking.md").read_text()
    named = set(re.findall(r"^\| `([\w-]+)[^|`]*` \|", text, re.MULTILINE))
    assert named - {"edgevlm"} == {*COMMANDS}, "edgevlm: the head"
