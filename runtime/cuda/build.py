"""Compiles ``csrc/kernels.cu``, which includes every kernel, with nvcc.

Needs only the standard library: setup.py runs this file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Machine code for Jetson Orin and Hopper, and PTX that the driver compiles for every device from Turing on.
TARGETS = (
    "-gencode=arch=compute_87,code=sm_87",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_75,code=compute_75",
)
FLAGS = ("-std=c++17", "-O3", "--fatbin", "-Werror", "all-warnings")


def nvcc() -> str | None:
    """Return the compiler, on PATH or in CUDA_HOME; None if there is none, or EDGEVLM_CUDA=0 disables it."""
    if os.environ.get("EDGEVLM_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def compile_kernels(compiler: str, source: Path, target: Path) -> None:
    """Compile one module for all of :data:`TARGETS`. Raises subprocess.CalledProcessError; nvcc writes the reason to stderr."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, *FLAGS, *TARGETS, "-o", str(target), str(source)], check=True)
