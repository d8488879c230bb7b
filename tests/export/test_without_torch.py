"""Exports by a Python that has neither torch nor transformers, nor what else the tests' oracles bring."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from more_checkpoints import FRAME

from edgevlm.runtime.graph_profiles import ONNXRUNTIME, PROFILES

FAMILIES = ("llava", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
PROGRAM = """
import json, sys
for package in ("torch", "torchvision", "transformers", "onnxscript", "onnx_ir"):
    sys.modules[package] = None
from edgevlm.export import export_checkpoint
checkpoint, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for number, given in enumerate(options):
    export_checkpoint(checkpoint, f"{folder}/{number}", **given)
print(len(options))
"""
PRECISIONS = ("fp16", "int8", "int4", "int4-zp")
OPTIONS = [
    *({"precision": precision} for precision in PRECISIONS),
    *({"kv": kv} for kv in ("fp16", "int8")),
    {"vision_precision": "int8"},
    *(
        {"profile": profile, "precision": precision, "kv": "fp16"}
        for profile in PROFILES if profile != ONNXRUNTIME
        for precision in ("fp32", *PRECISIONS[:3])
    ),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_precision(exported: Any, tmp_path: Any, family: str) -> None:
    options = [{"camera": FRAME, "kv": "fp32"} | each for each in ([{}] if family != "llava_onevision" else [{}, *OPTIONS])]
    made = exported(family)
    arguments = [sys.executable, "-c", PROGRAM, made.checkpoint, tmp_path, json.dumps(options)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.stdout == f"{len(options)}\n", done.stderr[-3000:]
    for path in made.bundle.iterdir():
        assert (tmp_path / "0" / path.name).read_bytes() == path.read_bytes(), path.name
