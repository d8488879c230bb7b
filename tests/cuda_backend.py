"""Where caches of a test lie: ``cpu``, ``cuda``, or ``cuda-shim``, the CUDA cache with its kernels compiled by g++.

The shim shows, without a device, what kernels, dispatch and driver calls compute; not their speed, nor how real threads
would meet in memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edgevlm.errors import UserError
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.cuda import kernels
from edgevlm.runtime.cuda.cache import CudaCache
from edgevlm.runtime.cuda.driver import Driver, open_driver

SHIM = Path(__file__).parent / "cuda_shim"
SOURCE = Path(__file__).parents[1] / "runtime" / "csrc" / "kernels.cu"


@cache
def why_no_device() -> str:
    """Empty where there is a CUDA device."""
    try:
        open_driver()
    except UserError as error:
        return str(error)
    return ""


DEVICES = ("cuda-shim",) if why_no_device() else ("cuda",)
BACKENDS = ("cpu", *DEVICES)


def compiled_shim() -> Path:
    """Our kernels as a library for this processor, built once for these sources; skips without g++, or without the sources."""
    if not SOURCE.exists():
        pytest.skip("the CUDA shim needs the sources of the kernels")
    parts = [*sorted(SOURCE.parent.glob("*.cu*")), SHIM / "cuda_fp16.h"]
    flags = ("-fno-strict-aliasing", "-Wno-unknown-pragmas", f"-I{SHIM}")
    return _compiled("kernels", [SOURCE, SHIM / "blocks.cpp"], parts, *flags)


@cache
def fake_libcuda() -> ctypes.CDLL:
    """The stand-in for ``libcuda.so.1``, loaded in its place before pycuda is; skips where there is another, or no pycuda."""
    if not why_no_device():
        pytest.skip("the driver of this machine is loaded")
    if (found := find_spec("pycuda")) is None or shutil.which("nm") is None:
        pytest.skip("the CUDA shim needs pycuda, and nm of binutils")
    (extension,) = Path(str(found.origin)).parent.glob("_driver.*.so")
    wanted = subprocess.run(["nm", "-D", "--undefined-only", extension], capture_output=True, text=True, check=True).stdout
    ours = (SHIM / "libcuda.cpp").read_text()
    unused = [name for name in sorted(set(re.findall(r"\bcu[A-Z]\w+|\bcurand\w+", wanted))) if f" {name}(" not in ours]
    stubs = "".join(f"int {name}() {{ return 801; }}\n" for name in unused)  # CUDA_ERROR_NOT_SUPPORTED
    return ctypes.CDLL(
        str(_compiled("libcuda", [SHIM / "libcuda.cpp"], [], "-Wl,-soname,libcuda.so.1", stubs=stubs)), os.RTLD_GLOBAL
    )


def _compiled(name: str, sources: list[Path], parts: list[Path], *flags: str, stubs: str = "") -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the CUDA shim needs g++")
    named = hashlib.sha256(b"".join(part.read_bytes() for part in (*sources, *parts)) + stubs.encode()).hexdigest()[:16]
    library = SOURCE.parents[2] / "build" / f"cuda-shim-{name}-{named}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        common = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *flags)
        text = f'extern "C" {{\n{stubs}}}\n'
        files = ("-x", "c++", *map(str, sources), "-")
        subprocess.run((compiler, *common, *files, "-o", str(fresh), "-ldl"), input=text, text=True, check=True)
        fresh.rename(library)
    return library


@contextmanager
def fake_devices(count: int = 1, integrated: int = 0) -> Iterator[ctypes.CDLL]:
    """The stand-in with this many devices; it has none at other times, so that nothing else finds one."""
    library = fake_libcuda()
    devices, shares = (ctypes.c_int.in_dll(library, name) for name in ("device_count", "integrated"))
    devices.value, shares.value = count, integrated
    try:
        yield library
    finally:
        devices.value = shares.value = 0


@cache
def shim_driver() -> Driver:
    """Our driver over the stand-in, with our kernels loaded."""
    with fake_devices():
        driver = Driver(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "load_fatbin", lambda: str(compiled_shim()).encode())
        kernels._module(driver)
    return driver


def backend(name: str):
    """What makes a cache on a backend, with the arguments of KVCache; skips where the shim cannot be."""
    if name == "cpu":
        return KVCache
    if name == "cuda-shim":
        if "EDGEVLM_SANITIZE" in os.environ:
            pytest.skip("the shim's fibers are not what AddressSanitizer takes for a stack")
        return partial(CudaCache, driver=shim_driver())
    return partial(CudaCache, driver=open_driver())


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
