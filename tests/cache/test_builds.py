"""The extension's stub, and builds of it for aarch64; tests/aarch64.sh also runs those."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "runtime" / "csrc"


@pytest.mark.skipif(shutil.which("pybind11-stubgen") is None, reason="pybind11-stubgen is not installed")
@pytest.mark.skipif("EDGEVLM_SANITIZE" in os.environ, reason="the sanitized build has the same signatures")
def test_the_stub_is_of_this_extension(tmp_path):
    subprocess.run([ROOT / "tests" / "stub.sh", tmp_path / "made.pyi"], check=True)
    assert (tmp_path / "made.pyi").read_text() == (ROOT / "runtime" / "_native.pyi").read_text(), "run tests/stub.sh"


NEEDED = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")  # Debian: apt install g++-aarch64-linux-gnu qemu-user-static
MISSING = [name for name in NEEDED if not shutil.which(name)]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.skipif(not SOURCES.exists(), reason="the sources are in the source tree only")
@pytest.mark.skipif("EDGEVLM_SANITIZE" in os.environ, reason="the sanitizer would be loaded into compiler and emulator")
def test_neon_agrees_with_plain_code(tmp_path):
    program = tmp_path / "check"
    files = [SOURCES / f"simd{part}.cpp" for part in ("", "_scalar", "_neon")] + [Path(__file__).with_name("simd_check.cpp")]
    compiler = [NEEDED[0], "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-I", SOURCES]
    subprocess.run([*compiler, *files, "-o", program], check=True)
    done = subprocess.run([NEEDED[1], program, "neon"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "neon agrees with scalar\n")
