"""What surrounds the command: its environment, a stdout that fails, characters that cannot be shown, interrupts, completion."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typed import events, of_kind, start

COUNT = "how many objects are there now?"


def test_every_option_has_a_variable():
    said = {
        "EDGEVLM_RUN_FRAMES": "6",
        "EDGEVLM_RUN_JSON": "1",
        "EDGEVLM_RUN_THREADS": "2",
        "EDGEVLM_RUN_ASK": f"{COUNT}\nwhich shape came first?",
        "EDGEVLM_RUN_ASK_AT": f"1:{COUNT}",
    }
    *found, summary = events("run", **said)
    answers = of_kind(found, "answer")
    assert [answer["question"] for answer in answers] == [COUNT, COUNT, "which shape came first?"]
    assert [answer["time_s"] for answer in answers] == [1.0, 3.0, 3.0]
    assert summary["frames"] == 6


@pytest.mark.parametrize("arguments", [["run", "--json"], ["policies"]])
def test_a_full_stdout_is_one_line_and_exit_code_2(arguments):
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert [line for line in said.splitlines() if line.startswith("edgevlm: ") and "No space left" in line]
    assert "Traceback" not in said
    assert "Exception" not in said


@pytest.mark.parametrize("arguments", ["policies", "run --frames 20"])
def test_a_reader_that_has_enough_is_no_failure(arguments):
    command = f"{sys.executable} -m edgevlm {arguments} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(("encoding", "output"), [("utf-8:strict", []), ("ascii", ["--json"])])
def test_characters_that_cannot_be_shown_end_nothing(encoding, output):
    question = "wh\u00e4t \U0001f600 \udce9?"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    process = start("run", "--frames", 2, "--ask", question, *output, env=environment, text=False)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    if output:
        (answer,) = of_kind(map(json.loads, out.splitlines()), "answer")
        assert answer["question"] == question


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
target = sys.argv.pop()
class AtImport:
    def find_spec(self, name, *_):
        if name == target:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtImport())
from edgevlm.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "numpy", "edgevlm.calib.demo.world"])
def test_an_interrupt_while_it_loads_is_quiet(module):
    process = start("run", module, code=INTERRUPTED)
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode in (-signal.SIGINT, 130)


def test_a_shell_completes_options():
    words = {"_EDGEVLM_COMPLETE": "complete_bash", "COMP_WORDS": "edgevlm run --reindexing ", "COMP_CWORD": "3"}
    command = [sys.executable, "-m", "edgevlm"]
    assert subprocess.check_output(command, env=os.environ | words, text=True).split() == ["lazy", "eager"]
