"""`edgevlm models`: its facts beside published sizes, its lines within 80 columns, and the documents' tables as made."""

import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgevlm.apps.planning.catalogue import checkpoints
from edgevlm.cli import app
from edgevlm.export.families import load_family
from edgevlm.runtime.plugins import names

ROOT = Path(__file__).parents[3]
PARAMETERS = {  # as the hub counts a checkpoint's tensors
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": 256_484_928,
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": 507_482_304,
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": 2_246_784_880,
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}


def test_sizes_are_the_hubs():
    found = {checkpoint.name: checkpoint.parameters for checkpoint in checkpoints()}
    assert {name: found[name] for name in PARAMETERS} == pytest.approx(PARAMETERS, rel=0.002)


def test_every_family_has_a_checkpoint():
    families = {checkpoint.model.family for checkpoint in checkpoints()}
    assert families == set(names("families", own=True))
    assert all(load_family(family, "") for family in families)


@pytest.mark.parametrize(("device", "last"), [([], None), (["--device", "laptop"], "0.41"), (["--device", "orin-nano-8"], "-")])
def test_the_table_fits_a_terminal_and_says_what_it_is(device, last):
    done = CliRunner().invoke(app, ["models", *device])
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "Predicted by edgevlm plan, 2 frames a second asked; we have run none of these with real weights." in said
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    (row,) = (line.split() for line in done.stdout.splitlines() if line.startswith("Qwen/Qwen2.5-VL-7B"))
    assert last in (None, row[-1])


def test_tables_in_documents_are_what_the_plan_says():
    made = runpy.run_path(str(ROOT / "docs" / "plan_tables.py"))
    for document in made["DOCUMENTS"]:
        text = document.read_text(encoding="utf-8")
        assert made["filled"](text) == text, f"{document.name}: run python docs/plan_tables.py"
        assert made["MARKED"].search(text)
