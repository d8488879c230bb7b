"""The whole extension for aarch64, where there is a cross compiler; tests/aarch64.sh also runs it."""

import os
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "runtime" / "csrc"
COMPILER = "aarch64-linux-gnu-g++"  # Debian: apt install g++-aarch64-linux-gnu
AARCH64 = 183  # e_machine of an ELF file


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"not installed: {COMPILER}")
@pytest.mark.skipif(not SOURCES.exists(), reason="the sources are in the source tree only")
@pytest.mark.skipif("EDGEVLM_SANITIZE" in os.environ, reason="the sanitizer would be loaded into the compiler")
def test_the_extension_compiles_without_a_warning(tmp_path):
    """With this machine's pyconfig.h: another 64-bit Linux has the same, but Debian keeps it where only its own is found."""
    pybind11 = pytest.importorskip("pybind11")
    version = "python" + sysconfig.get_python_version()
    other = tmp_path / "aarch64-linux-gnu" / version
    other.mkdir(parents=True)
    shutil.copy(sysconfig.get_config_h_filename(), other)
    include = [tmp_path, SOURCES, pybind11.get_include(), sysconfig.get_path("include")]
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    library = tmp_path / "_native.so"
    files = sorted(SOURCES.glob("*.cpp"))
    subprocess.run([COMPILER, *flags, *(f"-I{folder}" for folder in include), *files, "-o", library], check=True)
    assert struct.unpack_from("<H", library.read_bytes(), 18) == (AARCH64,)
