"""Where caches of a test lie: ``cpu``, ``cuda``, or ``cuda-shim``, the CUDA cache with its kernels compiled by g++.

The shim shows, without a device, what kernels, dispatch and driver calls compute; not their speed, nor how real threads
would meet in memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edgevlm.errors import UserError
from edgevlm.runtime import cuda
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.cuda import kernels
from edgevlm.runtime.cuda.cache import CudaCache
from edgevlm.runtime.cuda.driver import open_driver

SHIM = Path(__file__).parent / "cuda_shim"
SOURCE = Path(__file__).parents[1] / "runtime" / "csrc" / "kernels.cu"
BACKENDS = ("cpu", "cuda", "cuda-shim")


def compiled_shim() -> Path:
    """Our kernels as a library for this processor, built once for these sources; skips without g++, or without the sources."""
    compiler = shutil.which("g++")
    if compiler is None or not SOURCE.exists():
        pytest.skip("the CUDA shim needs g++ and the sources of the kernels")
    parts = sorted(SOURCE.parent.glob("*.cu*")) + sorted(SHIM.iterdir())
    named = hashlib.sha256(b"".join(part.read_bytes() for part in parts if part.is_file())).hexdigest()[:16]
    library = SOURCE.parents[2] / "build" / f"cuda-shim-{named}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        flags = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")
        command = (compiler, *flags, "-Wno-unknown-pragmas", f"-I{SHIM}", "-x", "c++", str(SOURCE), str(SHIM / "blocks.cpp"))
        subprocess.run((*command, "-o", str(fresh)), check=True)
        fresh.rename(library)
    return library


def shim_module(name: str = "cuda_shim_driver") -> ModuleType:
    """The stand-in for ``cuda.bindings.driver``."""
    return _module(name, SHIM / "driver.py")


@cache
def shim_driver():
    """Our adapter of cuda-python, itself, over the stand-in."""
    fake = shim_module()
    fake.settings.library = compiled_shim()
    driver = bound_to(fake)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "kernel_image", lambda: b"")
        kernels._module(driver)
    return driver


def bound_to(fake: ModuleType):
    """The adapter of cuda-python, on a stand-in for its package."""
    parts = {"cuda": ModuleType("cuda"), "cuda.bindings": ModuleType("cuda.bindings"), "cuda.bindings.driver": fake}
    parts["cuda.bindings"].driver = fake
    with pytest.MonkeyPatch.context() as patch:
        for name, module in parts.items():
            patch.setitem(sys.modules, name, module)
        return _module("shim_bindings", Path(cuda.__path__[0]) / "through_bindings.py").Bindings(0)


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def backend(name: str):
    """What makes a cache on a backend, with the arguments of KVCache; skips where there is none, saying why."""
    if name == "cpu":
        return KVCache
    if name == "cuda-shim":
        if "EDGEVLM_SANITIZE" in os.environ:
            pytest.skip("the shim's fibers are not what AddressSanitizer takes for a stack")
        return partial(CudaCache, driver=shim_driver())
    try:
        return partial(CudaCache, driver=open_driver())
    except UserError as error:
        pytest.skip(str(error).partition(" (")[0].partition(": ")[0])


class Window:
    """``[Hkv, C, D]`` of one layer in a device's memory, read and written by copies."""

    def __init__(self, driver, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._driver, self._address, self._shape, self.dtype = driver, address, shape, dtype

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        held = np.empty(self._shape, self.dtype)
        self._driver.copy_out(held, self._address)
        self._driver.main.synchronize()
        return held if dtype is None else held.astype(dtype)

    def __getitem__(self, index):
        return np.asarray(self)[index]

    def __setitem__(self, index, numbers) -> None:
        held = np.asarray(self)
        held[index] = numbers
        self._driver.copy_in(self._address, held)
        self._driver.main.synchronize()


def memory(buffer):
    """(key, value) of one layer, ``[H, C, D]``, to read and write by index, wherever they lie."""
    shape, addresses = buffer.shape[1:], (buffer.key_address, buffer.value_address)
    if isinstance(buffer.owner, CudaCache):
        return tuple(Window(buffer.owner.kernels.driver, address, shape, buffer.dtype) for address in addresses)
    kind = ctypes.c_char * int(np.prod(shape) * buffer.dtype.itemsize)
    return tuple(np.frombuffer(kind.from_address(address), buffer.dtype).reshape(shape) for address in addresses)
