"""Build the C++ extension, and package ``edgevlm/``, which links to ``runtime/``, ``engines/`` and the other folders."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.errors import BaseError, CCompilerError

sources = sorted(str(path) for path in Path("edgevlm/runtime/csrc").glob("*.cpp"))
compile_args = ["-O3", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra"]
link_args: list[str] = []
if sanitizers := os.environ.get("EDGEVLM_SANITIZE"):  # e.g. address,undefined: see CONTRIBUTING.md
    compile_args += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1"]
    link_args += [f"-fsanitize={sanitizers}"]

CUDA = runpy.run_path("edgevlm/runtime/cuda/build.py")


NEEDED = (
    "edgevlm: its C++ extension was not built; install a C++17 compiler and Python's headers: apt install g++ python3-dev "
    "(Debian, Ubuntu), dnf install gcc-c++ python3-devel (Fedora), apk add g++ python3-dev (Alpine)"
)


class BuildExt(build_ext):
    """Builds the C++ extension and, if nvcc is installed, the CUDA kernels."""

    def run(self) -> None:
        try:
            super().run()
        except (OSError, BaseError, CCompilerError) as error:
            sys.exit(f"{error}\n{NEEDED}")
        if compiler := CUDA["nvcc"]():
            folder = Path("edgevlm/runtime") if self.inplace else Path(self.build_lib, "edgevlm", "runtime")
            try:
                CUDA["compile_kernels"](compiler, Path("edgevlm/runtime/csrc/kernels.cu"), folder / "cuda" / "kernels.fatbin")
            except subprocess.CalledProcessError as error:
                sys.exit(f"nvcc failed with status {error.returncode}; EDGEVLM_CUDA=0 builds without the CUDA kernels")


ParallelCompile("EDGEVLM_BUILD_JOBS", default=2).install()
setup(
    packages=find_packages(include=["edgevlm", "edgevlm.*"]),
    package_dir={"": "."},  # makes an editable install a path file, which type checkers and editors follow
    ext_modules=[
        Pybind11Extension(
            "edgevlm.runtime._native",
            sources,
            include_dirs=["edgevlm/runtime/csrc"],
            depends=sorted(str(path) for path in Path("edgevlm/runtime/csrc").glob("*.[hi]*")),
            cxx_std=17,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
