"""The examples run as they stand, pass `edgevlm check` and `mypy --strict`, and are what the pages of the guide show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgevlm.testing import check

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = {
    "policy": "coreset_policy.py", "source": "camera.py", "family": "internvl.py", "engine": "openvino_engine.py",
    "embedding": "robot.py",
}  # fmt: skip


def run(*command, **where):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, **where)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_example_complete(page):
    text = (ROOT / f"docs/guide/extend/{page}.md").read_text()
    assert text.split("```python\n")[1].split("```")[0] == (EXAMPLES / PAGES[page]).read_text()
    for command in re.findall(r"^edgevlm check (\S+)", text, re.MULTILINE):
        assert command.startswith(f"./examples/{PAGES[page]}:")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("coreset_policy.py:Centres", ["budget", "state", "speed"]),
        ("merging_policy.py:Merge", ["budget", "state", "speed"]),
        ("camera.py:bars", ["frames", "end", "close"]),
        ("openvino_engine.py:OpenVino", ["features of frames", "embeddings", "decoder"]),
    ],
)
def test_an_example_passes_the_check(name, lines):
    if "openvino" in name:
        pytest.importorskip("openvino")
    assert [line.partition(":")[0] for line in check(f"{EXAMPLES / name}")] == lines


def test_the_robot_and_the_service_run():
    said = run(EXAMPLES / "robot.py")
    assert re.fullmatch(r"(Session\(demo, .*\n|\d+\.\d s: (True|False)\n)+\d objects, also after a restart\n", said)
    assert re.fullmatch(r"camera 0: \d\ncamera 1: \d\n", run(EXAMPLES / "service.py"))


def test_the_notebook_runs():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    shown = [cell.outputs[-1]["data"]["text/plain"] for cell in book.cells if cell.cell_type == "code"]
    assert re.match(r"Session\(demo, .* of 1000 tokens, 64 frames, 32\.0 s\)", shown[0])
    assert shown[-1] == "Session(demo, closed)"


def test_the_examples_are_typed(tmp_path):
    """With the imports of a user's own file: nothing is private, nothing is untyped."""
    pytest.importorskip("mypy")
    files = sorted(EXAMPLES.glob("*.py"))
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-openvino.*]\nignore_missing_imports = True\nfollow_imports = skip\n")
    run("-m", "mypy", "--strict", "--config-file", config, "--cache-dir", tmp_path, *files, cwd=ROOT, env=os.environ)
    for file in files:
        modules = set(re.findall(r"from (edgevlm\S*) import", file.read_text()))
        assert modules <= {"edgevlm", "edgevlm.extend"}, file
