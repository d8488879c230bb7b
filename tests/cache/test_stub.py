"""``runtime/_native.pyi`` is what pybind11-stubgen makes of the built extension."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("pybind11-stubgen") is None, reason="pybind11-stubgen is not installed")
@pytest.mark.skipif("EDGEVLM_SANITIZE" in os.environ, reason="the sanitized build has the same signatures")
def test_the_stub_is_of_this_extension(tmp_path):
    subprocess.run([ROOT / "tests" / "stub.sh", tmp_path / "made.pyi"], check=True)
    assert (tmp_path / "made.pyi").read_text() == (ROOT / "runtime" / "_native.pyi").read_text(), "run tests/stub.sh"
