"""Compile ``csrc/kernels.cu``, which includes every kernel, with nvcc.

This file imports only the standard library, because setup.py runs it.
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
    """Return the path of nvcc from PATH or CUDA_HOME, or None if it is missing or EDGEVLM_CUDA=0 disables it."""
    if os.environ.get("EDGEVLM_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def compile_kernels(compiler: str, source: Path, target: Path) -> None:
    """Compile the kernels for all TARGETS. Raises subprocess.CalledProcessError if nvcc fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, *FLAGS, *TARGETS, "-o", str(target), str(source)], check=True)
