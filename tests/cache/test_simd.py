"""The instruction sets: chosen, forced, and each doing what the others do."""

import os
import subprocess
import sys

import numpy as np
import pytest
import reference

from edgevlm.errors import CacheError
from edgevlm.runtime import _native, kernels

pytestmark = pytest.mark.cpu


def test_the_best_of_this_processor_is_used_unless_told_otherwise(kit):
    if kit.sanitized:
        pytest.skip("the sanitizer slows a new process down")
    code = "from edgevlm.runtime import kernels; print(kernels.simd())"
    best = kit.instruction_sets[-1]
    for wanted in (None, *kit.instruction_sets):
        environment = {name: value for name, value in os.environ.items() if name != "EDGEVLM_SIMD"}
        environment |= {"EDGEVLM_SIMD": wanted} if wanted else {}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == (wanted or best)


def test_an_instruction_set_that_is_not_there():
    before = kernels.simd()
    for name in ("sse9", "", "AVX2"):
        with pytest.raises(CacheError, match="set EDGEVLM_SIMD to scalar, avx2, avx512 or neon"):
            kernels.use_simd(name)
    assert kernels.simd() == before


def test_every_half_is_rounded_as_numpy_rounds_it(kit, isa):
    """Through append, which rounds, and value_norms, which reads: all 65,536 patterns, and numbers between them."""
    if kit.dtype != "fp16":
        pytest.skip("of fp16")
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    ordered = np.unique(halves)
    between = np.float32(0.5) * ordered[1:] + np.float32(0.5) * ordered[:-1]  # exact ties
    past = np.array([65519.99, 65520, 1e9, np.inf, -np.inf, 1e-8, 2.0**-25, -(2.0**-25), 3e-45], np.float32)
    numbers = np.concatenate([halves, between, np.nextafter(between, np.inf, dtype=np.float32), past])
    width = 6  # so that rows end in part of a vector
    rows = -(-len(numbers) // width)
    given = np.resize(numbers, (1, rows, width))
    cache = kit.make(layers=1, kv_heads=1, head_dim=width, capacity=rows)
    cache.append(0, given, given, kit.rows(rows))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(cache.key(0), given.astype(np.float16))
    finite = cache.value(0)[:, np.isfinite(cache.value(0)).all(-1)[0]]
    np.testing.assert_allclose(kernels.value_norms(finite), reference.value_norms(finite), rtol=1e-6)


def test_the_plain_read_reads(kit, isa):
    cache = kit.make(layers=1, kv_heads=1, head_dim=64, capacity=16)
    cache.reserve(16)
    cache.commit(kit.rows(16))
    assert not _native.read(cache)  # all zero
    kit.memory(cache.buffers()[0])[1][0, 9, 3] = 1
    assert _native.read(cache)
