"""Tables in documents are what docs/results.jsonl gives."""

import sys
from pathlib import Path

import pytest

from edgevlm.bench.results.journal import read_runs

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs"))
import tables  # noqa: E402
from tables import MARKED, filled  # noqa: E402

RESULTS = ROOT / "docs/results.jsonl"
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if MARKED.search(path.read_text())]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_what_the_results_give(path):
    text = path.read_text()
    assert filled(text, read_runs([RESULTS])) == text


def test_every_table_stands_in_a_document():
    used = {name for path in DOCUMENTS for _, name, _, _ in MARKED.findall(path.read_text())}
    assert used == {*tables.TABLES}


def test_the_results_say_what_they_are_from():
    for run in read_runs([RESULTS]):
        if run.section("machine"):
            assert run.section("machine")["cpu"]
            assert run.section("versions")["onnxruntime"]
        else:
            assert run.header["note"].startswith("Read from docs/"), "what was read from a plot says so"
        assert all(entry.command.startswith("edgevlm bench ") for entry in run.entries.values())
