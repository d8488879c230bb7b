"""Importing the runtime brings in no backend and no exporter."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "safetensors", "cv2", "tensorrt")


def test_runtime_and_engines_import_nothing_heavy() -> None:
    program = (
        "import sys, edgevlm.engines, edgevlm.runtime.engine, edgevlm.runtime, edgevlm.runtime.bundle, edgevlm.export\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
