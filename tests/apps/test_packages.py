"""Packages that a command needs: one line where one is missing, or is there and cannot be loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgevlm.errors import UserError
from edgevlm.packages import install, needed, needs


def test_one_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    clone = Path(__file__).resolve().parents[2]
    with pytest.raises(UserError, match=rf"^exporting needs the package nothing_here, .*: pip install -e '{clone}\[gguf\]'$"):
        needed("nothing_here", "exporting", "gguf")
    monkeypatch.setattr("edgevlm.packages.__file__", "/usr/lib/python3/site-packages/edgevlm/packages.py")
    assert install("gguf") == "pip install 'edgevlm[gguf]'"


def test_one_whose_library_is_missing_says_so():
    with (
        pytest.raises(UserError, match=r"^engine x needs a package .* cannot be loaded \(libnvinfer.so.10: cannot open"),
        needs("engine x"),
    ):
        raise ImportError("libnvinfer.so.10: cannot open shared object file\nmore", name="tensorrt")


def test_our_own_mistakes_are_not_taken_for_a_package():
    with pytest.raises(ImportError, match="no name"), needs("engine x"):
        raise ImportError("no name", name="edgevlm.engines")


def test_onnx_runtime_keeps_and_sends_nothing_of_its_own(tmp_path):
    """Its makers' builds keep an id of the machine and send what is run, but not where CI is set."""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", "import edgevlm.engines.onnxruntime_cpu"], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))
