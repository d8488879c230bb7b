"""Caches of every precision, and rows to put into them the way an engine does: through the raw addresses."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_backend import BACKENDS, backend, memory

from edgevlm.errors import CacheError
from edgevlm.runtime import _native, kernels
from edgevlm.runtime.cache import Kind, Rows
from edgevlm.runtime.cuda.cache import CudaCache
from edgevlm.runtime.kv import DTYPES, KVScales, codes

SANITIZED = "EDGEVLM_SANITIZE" in os.environ  # set by tests/sanitize.sh, which puts its build first on the path
if SANITIZED:
    assert _native.__file__.startswith(os.environ["PYTHONPATH"].split(os.pathsep)[0]), (
        f"not the sanitized build: {_native.__file__}"
    )


def runs_here(name):
    before = kernels.simd()
    try:
        kernels.use_simd(name)
    except CacheError:
        return False
    kernels.use_simd(before)
    return True


INSTRUCTION_SETS = [name for name in ("scalar", "neon", "avx2", "avx512") if runs_here(name)]  # the best one last


@pytest.fixture(scope="module")
def isa(request):
    """Each instruction set of this processor in turn."""
    before = kernels.simd()
    kernels.use_simd(request.param)
    yield request.param
    kernels.use_simd(before)


def frequencies(head_dim, base=1e4):
    return 1 / base ** (np.arange(0, head_dim, 2) / head_dim)


def make(layers=2, kv_heads=2, head_dim=8, capacity=32, axes=1, dtype="fp32", sections=None, interleaved=False, where="cpu"):
    return backend(where)(
        layers, kv_heads, head_dim, capacity,
        inv_freq=frequencies(head_dim), axes=axes, dtype=dtype, sections=sections, interleaved=interleaved,
        scales=scales(layers, kv_heads, head_dim) if dtype == "int8" else None,
    )  # fmt: skip


def scales(layers, kv_heads, head_dim):
    """Scales that hold normal numbers, another for each channel."""
    random = np.random.default_rng(3)
    longest = np.concatenate([random.uniform(7, 9, (layers, kv_heads, head_dim // 2))] * 2, -1)
    largest = random.uniform(6, 8, (layers, kv_heads, head_dim))
    return KVScales(*((part / 127).astype(np.float32) for part in (longest, largest)))


def stored(numbers, scale, dtype):
    """``numbers [H, n, D]`` as a cache stores them."""
    return numbers.astype(dtype) if scale is None else codes(numbers, scale)


def rows(n, start=0, axes=1, kind=Kind.VISION, per_frame=4, width=2):
    """n rows whose seq and position run on from ``start``, laid out as frames of ``per_frame`` patches."""
    token = np.arange(start, start + n)
    patch = token % per_frame
    return Rows(
        kind=np.full(n, kind, np.uint8),
        seq=token.astype(np.int64),
        frame=(token // per_frame).astype(np.int32),
        row=(patch // width).astype(np.int16),
        col=(patch % width).astype(np.int16),
        position=np.repeat(token[:, None], axes, axis=1).astype(np.int32),
    )


def write(cache, n, rng):
    """Fill rows ``[n_l, n_l + n)`` of every layer with normal noise."""
    for buffer, length in zip(cache.buffers(), cache.lengths, strict=True):
        for array, scale in zip(memory(buffer), (buffer.key_scale, buffer.value_scale), strict=True):
            new = rng.standard_normal((cache.kv_heads, n, cache.head_dim), np.float32)
            array[:, length : length + n] = stored(new, scale, buffer.dtype)


def append(cache, n, start=0, rng=None, **kwargs):
    """Reserve, write noise, commit; returns the rows."""
    cache.reserve(n)
    write(cache, n, rng or np.random.default_rng(start))
    new = rows(n, start, cache.axes, **kwargs)
    cache.commit(new)
    return new


def rows_memory(cache):
    """A copy of the bytes of keys, values and what is known of them; of a device's of keys and values."""
    if isinstance(cache, CudaCache):
        return cache.memory[_native.Cache.nbytes.fget(cache) :]
    return cache.memory[cache.buffers()[0].key_address - cache.memory.ctypes.data :].copy()


def arrays(cache, layer):
    """Copies of everything a layer holds, each ``[H, n, ...]``."""
    names = ("key", "value", "kind", "seq", "frame", "row", "col", "position", "confirmed")
    return {name: getattr(cache, name)(layer).copy() for name in names}


def random_keep(rng, heads, n, kept):
    """A mask ``[heads, n]`` that keeps ``kept`` rows of each head."""
    keep = np.zeros((heads, n), np.bool_)
    for head in keep:
        head[rng.permutation(n)[:kept]] = True
    return keep


# Of a stored key of normal noise that was turned once: a few ulps, half an ulp of 8, half a code.
ERROR = {"fp32": 3e-6, "fp16": 4e-3, "int8": 0.5 + 1e-4}


ON_CPU = [("cpu", dtype) for dtype in DTYPES]
ON_DEVICES = [(where, dtype) for where in BACKENDS if where != "cpu" for dtype in DTYPES if dtype != "int8"]


def pytest_generate_tests(metafunc):
    """Every test of a cache runs on all backends and dtypes, but those marked ``cpu`` or, where dtypes are alike, ``once``.

    Instruction sets are the CPU's alone.
    """
    marked = metafunc.definition.get_closest_marker
    once = marked("once") is not None
    devices = [] if marked("cpu") else ON_DEVICES[:: len(DTYPES) - 1] if once else ON_DEVICES
    if "kit" not in metafunc.fixturenames:
        if "isa" in metafunc.fixturenames:
            metafunc.parametrize("isa", INSTRUCTION_SETS, indirect=True)
    elif "isa" in metafunc.fixturenames:
        pairs = [(isa, store) for store in ON_CPU for isa in INSTRUCTION_SETS]
        pairs += [(INSTRUCTION_SETS[-1], store) for store in devices]
        metafunc.parametrize(("isa", "kit"), pairs, indirect=True, ids=["-".join((*store, isa)) for isa, store in pairs])
    else:
        metafunc.parametrize("kit", ON_CPU[: 1 if once else None] + devices, indirect=True, ids="-".join)


def kit_of(where, dtype):
    """What tests of a cache need, with its backend and dtype."""
    return SimpleNamespace(
        frequencies=frequencies,
        make=partial(make, dtype=dtype, where=where),
        where=where,
        dtype=dtype,
        numpy=DTYPES[dtype],
        error=ERROR[dtype],
        stored=stored,
        scales=scales,
        memory=memory,
        rows=rows,
        write=write,
        append=append,
        arrays=arrays,
        rows_memory=rows_memory,
        random_keep=random_keep,
        sanitized=SANITIZED,
        instruction_sets=INSTRUCTION_SETS,
    )


@pytest.fixture(scope="session")
def kit(request):
    backend(request.param[0])
    return kit_of(*request.param)
