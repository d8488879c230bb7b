"""Wrong plugins: each ends its command with status 2 and one line that names it and, where it has one, its place.

The line of a file that is to be named ends with ``# here``; ``{file}`` and ``{line}`` stand for it in what is printed.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgevlm.testing import check

HEAD = """\
from dataclasses import dataclass
import numpy as np
from edgevlm.extend import Frame, Needs, OnnxRuntimeCpu, Policy, QueryWindow, Source, setting
joined = str.join  # has no __module__

"""
POLICIES = {
    "the interface of 0.1": (
        "@dataclass\nclass Mine(Policy):\n    def score(self, cache, layer):  # here\n        return -layer.seq\n",
        r"score must accept \(self, layer\), not \(self, cache, layer\): {file}, line {line}",
    ),
    "no dataclass": (
        "class Mine(Policy):  # here\n    newest: float = setting(0.5, 'newest')\n"
        "    def score(self, layer):\n        return layer.seq\n",
        r"Mine has settings \(newest\) but is not a dataclass; add @dataclass: {file}, line {line}",
    ),
    "no method": ("@dataclass\nclass Mine(Policy):\n    pass\n", r"Mine defines neither score\(\) nor compress\(\)"),
    "no policy": ("class Mine:\n    pass\n", r"Mine is not a subclass of edgevlm\.extend\.Policy"),
    "NaN": (
        "@dataclass\nclass Mine(Policy):\n    def score(self, layer):  # here\n"
        "        return np.full(layer.seq.shape, np.nan)\n",
        r"policy Mine: score\(\) returned NaN for layer 0; return a number for each row \({file}, line {line}\)",
    ),
    "another shape": (
        "@dataclass\nclass Mine(Policy):\n    def score(self, layer):  # here\n        return layer.seq[0]\n",
        r"policy Mine: score\(\) returned \[\d+\] for layer 0, not an array \[2, \d+\] \({file}, line {line}\)",
    ),
    "a list": (
        "@dataclass\nclass Mine(Policy):\n    def score(self, layer):  # here\n        return [1]\n",
        r"policy Mine: score\(\) returned list for layer 0, .*{file}, line {line}",
    ),
    "arrays without state_fields": (
        "@dataclass\nclass Mine(Policy):  # here\n    def score(self, layer):\n"
        "        self.last = layer.seq.copy()\n        return layer.seq\n",
        r"policy Mine keeps arrays in last; add them to state_fields, .*\(.*, line \d+\)",
    ),
    "too few rows": (
        "@dataclass\nclass Mine(Policy):\n    def compress(self, layer):  # here\n        layer.keep(layer.newest(3))\n",
        r"policy Mine: compress\(\) keeps too few rows: 3 in layer 0, KV head 0, not \d+ "
        r"\({file}, line {line}\)",
    ),
    "no rows": (
        "@dataclass\nclass Mine(Policy):\n    def compress(self, layer):  # here\n        pass\n",
        r"policy Mine: compress\(\) kept nothing in layer 0, not a bool mask .* \({file}, line {line}\)",
    ),
    "a merge into rows that leave": (
        "@dataclass\nclass Mine(Policy):\n    def compress(self, layer):\n"
        "        gone = layer.free & ~layer.newest(layer.target)\n"
        "        layer.merge(gone, np.zeros(gone.shape, int))  # here\n",
        r"policy Mine failed: {file}, line {line}: ValueError: merge: in layer 0, KV head 0, `into` refers to a row that is",
    ),
    "an error in attach": (
        "@dataclass\nclass Mine(Policy):\n    def attach(self, budget, shape):\n        1 / 0  # here\n"
        "    def score(self, layer):\n        return layer.seq\n",
        r"policy Mine failed: {file}, line {line}: ZeroDivisionError: division by zero \(EDGEVLM_DEBUG=1 shows the traceback\)",
    ),
    "a text that needs does not name": (
        "@dataclass\nclass Mine(Policy):\n    def score(self, layer):\n        return layer.attention_of('what moves?')\n",
        r"policy Mine failed: .*: attention_of: text 'what moves\?' is not in needs\.guidance; add it",
    ),
    "attach without its base": (
        "@dataclass\nclass Mine(Policy):\n    def attach(self, budget, shape):  # here\n        pass\n"
        "    def score(self, layer):\n        return layer.seq\n",
        r"policy Mine: attach\(\) does not call super\(\)\.attach\(budget, shape\) \({file}, line {line}\)",
    ),
    "a probe of no layer": (
        "@dataclass  # here\nclass Mine(Policy):\n    needs = Needs(probe_layers=(99,))\n"
        "    def score(self, layer):\n        return layer.seq\n",
        r"policy Mine: needs\.probe_layers lists layer 99, but the model has layers 0 to 3 \({file}, line {line}\)",
    ),
    "a window that was never filled": (
        "@dataclass\nclass Mine(Policy):\n    def score(self, layer):\n"
        "        return layer.attention_of(QueryWindow(8))  # here\n",
        r"policy Mine failed: {file}, line {line}: ValueError: the window has no queries for layer 0; add it to needs\.probe",
    ),
}
SOURCES = {
    "an image of floats": (
        "def Mine(target):  # here\n    yield np.zeros((8, 8, 3))\n",
        r"source {file}:Mine returned an image of float64 \[8, 8, 3\]; return uint8 RGB \[H, W, 3\] \({file}, line {line}\)",
    ),
    "times that run backwards": (
        "def Mine(fps):  # here\n    for seconds in (2.0, 1.0):\n        yield seconds, np.zeros((8, 8, 3), np.uint8)\n",
        r"source {file}:Mine returned a frame at 1\.0 s after 2 s; .*\({file}, line {line}\)",
    ),
    "an OSError": (
        "def Mine():\n    yield np.zeros((56, 56, 3), np.uint8)\n    raise OSError(5, 'Input/output error')  # here\n",
        r"source {file}:Mine failed: {file}, line {line}: OSError: \[Errno 5\] Input/output error \(EDGEVLM_DEBUG=1",
    ),
    "another parameter": (
        "def Mine(url):  # here\n    yield 1\n",
        r"source {file}:Mine requires a parameter 'url'; use only target, fps and options \({file}, line {line}\)",
    ),
    "no read": (
        "class Mine(Source):  # here\n    name = 'mine'\n",
        r"source {file}:Mine cannot be created with \(target, options\): .* \({file}, line {line}\)",
    ),
    "no frames": (
        "class Mine(Source):  # here\n    name = 'mine'\n    def __init__(self, target, options): ...\n"
        "    def read(self):\n        return 5\n",
        r"source {file}:Mine returned a int, not a Frame \({file}, line {line}\)",
    ),
    "no time": (
        "def Mine():  # here\n    yield None, np.zeros((8, 8, 3), np.uint8)\n",
        r"source {file}:Mine returned None as a frame's time; return seconds \({file}, line {line}\)",
    ),
    "one time for all": (
        "def Mine():  # here\n    for _ in range(9):\n        yield 2.0, np.zeros((8, 8, 3), np.uint8)\n",
        r"source {file}:Mine returned 9 frames at 2 s; return increasing times \({file}, line {line}\)",
    ),
    "an error in close": (
        "class Mine(Source):\n    name, live = 'mine', False\n    def __init__(self, target, options): ...\n"
        "    def read(self):\n        pass\n    def close(self):\n        1 / 0  # here\n",
        r"source {file}:Mine failed: {file}, line {line}: ZeroDivisionError: division by zero",
    ),
}
text, says = SOURCES["an error in close"]
SOURCES["an error in close of a camera"] = (text.replace("False", "True"), says)
CHECKED = {
    "an error in close": SOURCES["an error in close"],
    "one time without end": (
        "def Mine():  # here\n    while True:\n        yield 2.0, np.zeros((8, 8, 3), np.uint8)\n",
        r"source {file}:Mine returned 64 frames at 2 s; return increasing times \({file}, line {line}\)",
    ),
    "chosen by chance": (
        "@dataclass  # here\nclass Mine(Policy):\n    def score(self, layer):\n"
        "        return np.random.random(layer.seq.shape)\n",
        r"policy Mine keeps different rows after resuming from a snapshot; .* \({file}, line {line}\)",
    ),
    "a source that goes on after its end": (
        "class Mine(Source):\n    name, live, reads = 'mine', True, 0\n    def __init__(self, target, options): ...\n"
        "    def read(self):\n        self.reads += 1\n"
        "        return None if self.reads == 3 else Frame(np.zeros((8, 8, 3), np.uint8), float(self.reads))\n",
        r"source {file}:Mine returns a frame after its end",
    ),
    "nothing that can be checked": ("class Mine:  # here\n    pass\n", r"Mine is neither a policy.*\({file}, line {line}\)"),
}
ENGINES = {
    "queries off by 8.8": (
        "class Mine(OnnxRuntimeCpu):\n    def bind(self, *given):\n        decoder = super().bind(*given)\n"
        "        step = decoder.step\n"
        "        def off(*given, **more):\n            result = step(*given, **more)\n"
        "            for queries in result.probes.values():\n"
        "                queries += 8.8\n            return result\n        decoder.step = off\n        return decoder\n",
        r"engine {file}:Mine: queries of layer 0, in a call with 23 rows after 0, differ from "
        r"onnxruntime-cpu's by 8\.8, with values up to",
    ),
    "an error in encode": (
        "class Mine(OnnxRuntimeCpu):\n    def encode(self, pixels):\n        return pixels.nothing  # here\n",
        r"engine {file}:Mine failed: {file}, line {line}: AttributeError: .* no attribute 'nothing'",
    ),
}

TABLES = {"policy": POLICIES, "source": SOURCES, "engine": ENGINES, "checked": CHECKED}


def end_of(file: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "edgevlm", *command], capture_output=True, text=True, cwd=file.parent, timeout=120
    )
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, table in TABLES.items() for name in table],
)
def test_a_wrong_plugin_is_one_line_with_its_place(kind, name, tmp_path):
    text, says = TABLES[kind][name]
    file = tmp_path / "mine.py"
    file.write_text(HEAD + text)
    line = next((str(number) for number, each in enumerate(file.read_text().splitlines(), 1) if each.endswith("# here")), "")
    watch = ("run", "--budget", "256", "--append", "all", "--frames", "40", "--quiet")
    command = {"policy": (*watch, "--policy"), "source": ("run", "--quiet", "--camera")}.get(kind, ("check",))
    code, found = end_of(file, *command, f"{file}:Mine")
    assert code == 2
    wanted = says.replace("{file}", re.escape(str(file))).replace("{line}", line)
    assert re.search(wanted, found), found


def test_the_traceback_is_there_when_asked_for(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SOURCES["an OSError"][0])
    command = [sys.executable, "-m", "edgevlm", "run", "--quiet", "--camera", f"{file}:Mine"]
    debug = os.environ | {"EDGEVLM_DEBUG": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=debug, timeout=120)
    assert f'File "{file}", line' in done.stderr


def test_a_policy_that_was_named_and_skipped_ends_bench_accuracy_with_status_1(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + POLICIES["NaN"][0])
    asked = ("bench", "accuracy", "--suite", "streamqa", "--frames", "16", "--streams", "2", "--budget", "50%")
    code, found = end_of(file, *asked, "--policy", f"last-seen,{file}:Mine")
    assert (code, found) == (1, f"skipped: {file}:Mine; see the reasons above")


def test_doctor_fails_a_wrong_engine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + ENGINES["queries off by 8.8"][0])
    done = subprocess.run(
        [sys.executable, "-m", "edgevlm", "doctor", "--engine", f"{file}:Mine"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert re.search(r"^fail engine +engine .*: queries of layer 0", done.stdout, re.MULTILINE)


def test_what_is_right_passes():
    assert [line.partition(":")[0] for line in check("last-seen")] == ["budget", "state", "speed"]
    assert json.dumps(check("onnxruntime-cpu")).count("0.0e+00") == 3
