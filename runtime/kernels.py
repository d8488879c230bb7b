"""The scoring and selection kernels of policies, which run in C++ without the GIL.

Arrays may be strided views of a :class:`~edgevlm.runtime.cache.KVCache`; keys and values must be float32 or float16 and dense
in their last axis. Arrays other than keys and values are copied if their rows are not dense. A wrong dtype raises CacheError. A
kernel on a view of a cache allocates only its result. The scratch memory belongs to the cache and serves one call at a time.
Rows and caches on a CUDA device use the kernels in :mod:`edgevlm.runtime.cuda.kernels`. Scores of CUDA and C++ kernels agree
within float32 rounding, and lead to the same choices. Plain numpy versions in float64 are in tests/reference.py.
``help(edgevlm.runtime.kernels)`` documents each kernel.

Inner loops use the processor's best instruction set (avx512, avx2, neon or scalar), or the set that ``EDGEVLM_SIMD`` names when
this module is imported. Heads and layers are divided among :func:`set_threads` threads, by default one. Results are
bit-identical for any number of threads. Sums computed with different instruction sets may differ in the last digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from edgevlm.runtime import _native

P = ParamSpec("P")
R = TypeVar("R")

RowPart = _native.RowPart
attend = _native.attend
coreset = _native.coreset
index_of = _native.index_of
join = _native.join
levels = _native.levels
multiplies_codes = _native.multiplies_codes
newest_frames = _native.newest_frames
patch_distances = _native.patch_distances
patch_sums = _native.patch_sums
pool_norms = _native.pool_norms
set_threads = _native.set_threads
simd = _native.simd
threads = _native.threads
top_k = _native.top_k
use_simd = _native.use_simd

if _wanted := os.environ.get("EDGEVLM_SIMD"):
    use_simd(_wanted)


def cuda_twin(held: Any) -> Any:
    """Return the CUDA kernels for a cache or a view of one, or None if it is in host memory."""
    return getattr(held, "kernels", None)


def _on_either(native: Callable[P, R]) -> Callable[P, R]:
    """Wrap a kernel so that it runs where its arguments are: on the CPU or on a CUDA device."""

    @wraps(native)
    def run(*arguments: P.args, **others: P.kwargs) -> R:
        for held in (*arguments, *others.values()):
            if twin := cuda_twin(held):
                result: R = getattr(twin, native.__name__)(*arguments, **others)
                return result
        return native(*arguments, **others)

    return run


attention_mass = _on_either(_native.attention_mass)
infinipot_scores = _on_either(_native.infinipot_scores)
infinipot_select = _on_either(_native.infinipot_select)
newer_similarity = _on_either(_native.newer_similarity)
value_norms = _on_either(_native.value_norms)
