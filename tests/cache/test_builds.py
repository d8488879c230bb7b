"""The extension's stub, and builds of it for aarch64; tests/aarch64.sh also runs those."""

import os
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "runtime" / "csrc"


@pytest.mark.skipif(shutil.which("pybind11-stubgen") is None, reason="pybind11-stubgen is not installed")
@pytest.mark.skipif("EDGEVLM_SANITIZE" in os.environ, reason="the sanitized build has the same signatures")
def test_the_stub_is_of_this_extension(tmp_path):
    subprocess.run([ROOT / "tests" / "stub.sh", tmp_path / "made.pyi"], check=True)
    assert (tmp_path / "made.pyi").read_text() == (ROOT / "runtime" / "_native.pyi").read_text(), "run tests/stub.sh"


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
