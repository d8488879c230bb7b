"""Measure the memory bandwidth that a compression's kernels reach on a CUDA device, compared with a plain copy.

Each round compresses a full cache with InfiniPot-V, and then computes the attention of a few queries. CUDA events around each
kernel give its time; times are medians over rounds. A kernel's bandwidth counts the bytes of keys and values that it must read
and write. The bandwidth of a copy counts the bytes read and the bytes written.
"""

from __future__ import annotations

import ctypes
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from edgevlm.bench.noise import GROUP, CacheShape, FilledCache
from edgevlm.runtime import kernels as host_kernels
from edgevlm.runtime.cuda.cache import CudaCache
from edgevlm.runtime.cuda.kernels import Kernels
from edgevlm.runtime.engine import KVBuffer

# part -> its kernels; the last two parts' kernels read almost no keys and values
PARTS = {
    "value norms": ("value_norms",),
    "similarity": ("find_patches", "add_recent", "finish_means", "temporal_similarity"),
    "eviction": ("list_moves", "move_rows"),
    "re-rotation": ("turn_keys",),
    "probe mass": ("attention_scores", "attention_weights", "attention_mass"),
    "pooling": ("place_patches", "pool_norms"),
    "selection": ("choose_window", "choose_rows"),
}
QUERIES = 8  # query rows in a layer's probe


class FilledDeviceCache(FilledCache):
    """A cache on a CUDA device that can be filled with random numbers again and again."""

    kind = CudaCache

    def write(self, buffer: KVBuffer, start: int, rows: Sequence[np.ndarray]) -> None:
        assert isinstance(self.cache, CudaCache)
        driver, row = self.cache.kernels.driver, buffer.shape[3] * buffer.dtype.itemsize
        for address, new in zip((buffer.key_address, buffer.value_address), rows, strict=True):
            dense = np.ascontiguousarray(new)
            width = dense.shape[1] * row
            driver.copy_rows(address + start * row, buffer.shape[2] * row, dense, width, width, len(dense))
            driver.main.synchronize()


@contextmanager
def timed_launches(kernels: Kernels) -> Iterator[dict[str, float]]:
    """Time the CUDA kernels of the ``with`` block. After the block, the yielded dict holds each kernel's milliseconds."""
    launch, moments, found = kernels.launch, list[tuple[str, Any]](), defaultdict[str, float](float)

    def timed(name: str, grid: tuple[int, int, int], call: ctypes.Structure) -> None:
        ms = _timed(kernels, lambda: launch(name, grid, call))
        moments.append((name.removesuffix("_fp32").removesuffix("_fp16"), ms))

    kernels.launch = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del kernels.launch
    for name, ms in moments:
        found[name] += ms()


def _timed(kernels: Kernels, work: Callable[[], object]) -> Callable[[], float]:
    """Start work on the main stream. Return a function that waits for this work and returns its duration in ms."""
    driver = kernels.driver
    with driver.entered() as cuda:
        first, last = cuda.Event(), cuda.Event()
        first.record(driver.main.own)
        work()
        last.record(driver.main.own)

    def ms() -> float:
        with driver.entered():
            last.synchronize()
            return float(last.time_since(first))

    return ms


def measure(shape: CacheShape, dtype: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each part of a compression. The first round is not counted. Raises UserError without a CUDA device."""
    memory = FilledDeviceCache(shape, dtype)
    cache = memory.cache
    assert isinstance(cache, CudaCache)
    kernels, times, moved = cache.kernels, defaultdict[str, list[float]](list), dict[str, int]()
    for turn in range(rounds + 1):
        memory.fill()
        cache.known = [0] * cache.layers
        with timed_launches(kernels) as found:
            moved = _round(memory, cache)
        for part, names in PARTS.items() if turn else ():
            times[part].append(sum(found[name] for name in names))
    size = sum(2 * int(np.prod(buffer.shape)) * buffer.dtype.itemsize for buffer in cache.buffers())
    copy_gb_s = _copy(kernels, size, rounds)
    for part, each in times.items():
        ms = statistics.median(each)
        reached = moved.get(part, 0) / ms / 1e6 if ms else 0.0
        yield {
            "bench": "compression", "device": kernels.driver.device.name, "part": part, "dtype": dtype, **asdict(shape),
            "ms": round(ms, 4), "bytes": moved.get(part, 0), "gb_s": round(reached, 1), "copy_gb_s": round(copy_gb_s, 1),
            "fraction_of_copy": round(reached / copy_gb_s, 3),
        }  # fmt: skip


def _round(memory: FilledDeviceCache, cache: CudaCache) -> dict[str, int]:
    """Run each part of a compression once. Return how many bytes of keys and values each part must read and write."""
    shape, row = memory.shape, memory.shape.head_dim * cache.dtype.itemsize
    rows = shape.layers * shape.kv_heads * shape.tokens
    windows = [(7, 5, 3, 1)[4 * layer // shape.layers] for layer in range(shape.layers)]
    target = shape.tokens * 3 // 4
    keep = host_kernels.infinipot_select(cache, max(1, shape.tokens // shape.side**2 // 8), target // 4, target, windows)
    before = cache.rows_moved
    cache.evict(keep)
    moves, left = cache.rows_moved - before, int(cache.lengths.sum()) * shape.kv_heads
    at = [cache.position(layer).copy() for layer in range(shape.layers)]
    cache.reindex(0)
    turned = sum(int((cache.position(layer) != was).any(-1).sum()) for layer, was in enumerate(at))
    for layer in range(shape.layers):
        query = memory.noise(shape.kv_heads * GROUP, QUERIES)
        host_kernels.attention_mass(query, np.full(QUERIES, memory.next, np.int64), cache.key(layer), cache.seq(layer))
    both_ways = {"eviction": 2 * 2 * moves * row, "re-rotation": 2 * turned * row}
    return {"value norms": rows * row, "similarity": rows * row, "probe mass": left * row} | both_ways


def _copy(kernels: Kernels, nbytes: int, rounds: int) -> float:
    """Measure the bandwidth of a copy within the device's memory, in GB/s. ``nbytes``: the bytes read plus those written."""
    driver, half, times = kernels.driver, max(nbytes // 2, 1), []
    memory = driver.allocate(2 * half)

    def copy() -> None:
        with driver.entered() as cuda:
            cuda.memcpy_dtod_async(memory.address, memory.address + half, half, driver.main.own)

    for _ in range(rounds + 1):
        times.append(_timed(kernels, copy)())
    driver.free(memory)
    return 2 * half / statistics.median(times[1:]) / 1e6
