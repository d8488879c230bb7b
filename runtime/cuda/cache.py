"""Keep the cache of one stream with its keys and values in device memory.

The rows' metadata stays in host memory, in a small C++ cache called the ledger, where policies read it as arrays. The ledger
checks each call before the cache changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError, UserError
from edgevlm.runtime import _native
from edgevlm.runtime.cache import ROW_DTYPES, KVCache, Mark, Rows, native_shape
from edgevlm.runtime.cuda import calls, kernels
from edgevlm.runtime.cuda.calls import DeviceRows, aligned, require
from edgevlm.runtime.cuda.driver import Driver, open_driver
from edgevlm.runtime.cuda.kernels import Kernels
from edgevlm.runtime.engine import KVBuffer
from edgevlm.runtime.kv import DTYPES, KVScales


class CudaCache(KVCache):
    """A :class:`~edgevlm.runtime.cache.KVCache` on a GPU, in fp32 or fp16, with the same arguments, methods and errors.

    The arena is one block of device memory, zeroed at the start. If the device shares the host's memory, the arena is mapped
    from host memory. The arena has these arrays for each layer ``l``, aligned to 256 bytes::

        key_l, value_l   [Hkv, C_l, D]   dtype, keys rotated
        norm_l [Hkv, C_l] f32, norms of the values, once a policy needs them

    :meth:`key` and :meth:`value` return :class:`~edgevlm.runtime.cuda.calls.DeviceRows`; all other methods return the same as
    on the CPU. Methods return after the device has finished, so an engine may continue on a different stream. ``driver``: by
    default, the first device's driver. Raises UserError if the dtype is int8, there is no device, or its memory is too small.
    """

    __slots__ = ("_arena", "_reserved", "_row", "address", "kernels", "known")

    def __init__(self, *shape: Any, scales: KVScales | None = None, driver: Driver | None = None, **rotary: Any) -> None:
        if rotary.get("dtype") == "int8" or scales is not None:
            raise UserError("the CUDA cache supports fp16 and fp32, not int8; export the model again with --kv fp16")
        native = native_shape(*shape, **rotary)
        _native.Cache._bytes_for(*native)  # raises if an argument is invalid
        _native.Cache.__init__(self, *_ledger(*native))
        self._describe(native)
        self.known = [0] * self.layers  # the norms of a layer's rows [0, known) have been computed
        self._reserved, self._row = 0, self.head_dim * self.dtype.itemsize
        driver = driver or open_driver()
        self.kernels = Kernels(driver)
        *starts, end = _starts(native[0], self.kv_heads, self.head_dim, self.dtype)
        self._arena = driver.allocate(end)
        weakref.finalize(self, driver.free, self._arena)
        self.address = [
            tuple(self._arena.address + start for start in layer) for layer in starts
        ]  # each layer's keys, values and norms
        driver.clear(self._arena.address, end, end, 1)
        driver.main.synchronize()

    @classmethod
    def bytes_for(cls, *shape: Any, **rotary: Any) -> int:
        """Return the ``nbytes`` of a cache with these arguments, without allocating it."""
        native = native_shape(*shape, **rotary)
        _native.Cache._bytes_for(*native)
        capacities, kv_heads, head_dim, _, _, dtype, *_ = native
        return _native.Cache._bytes_for(*_ledger(*native)) + _starts(capacities, kv_heads, head_dim, DTYPES[dtype])[-1]

    @property
    def nbytes(self) -> int:
        """The size in bytes of the arena and the ledger, without the kernels' working memory."""
        return super().nbytes + self._arena.nbytes

    @property
    def memory(self) -> NDArray[np.uint8]:
        """A copy of the ledger's memory, followed by the arena's contents, ``[nbytes]``."""
        arena = np.empty(self._arena.nbytes, np.uint8)
        self.kernels.driver.copy_out(arena, self._arena.address)
        self.kernels.driver.main.synchronize()
        return np.concatenate([super().memory, arena])

    def buffers(self) -> list[KVBuffer]:
        return [
            KVBuffer(key, value, (1, self.kv_heads, int(rows), self.head_dim), self.dtype, self)
            for (key, value, _), rows in zip(self.address, self.capacities, strict=True)
        ]

    def key(self, layer: int) -> Any:
        return self._rows(layer, 0)

    def value(self, layer: int) -> Any:
        return self._rows(layer, 1)

    def value_norms(self, layer: int) -> NDArray[np.float32]:
        return self.kernels.value_norms(self.value(layer))

    def table(self, layers: Sequence[int], lengths: Sequence[int]) -> NDArray:
        """Return a description of each layer for the kernels, of dtype :data:`edgevlm.runtime.cuda.calls.LAYER`."""
        table = np.zeros(len(layers), calls.LAYER)
        for row, layer in zip(table, layers, strict=True):
            row["key"], row["value"], row["norm"] = self.address[layer]
            row["capacity"] = row["norm_stride"] = self.capacities[layer]
            row["known"] = self.known[layer]
        table["rows"] = lengths
        table["first"][1:] = self.kv_heads * np.cumsum(lengths, dtype=np.int64)[:-1]
        return table

    def copy_out(self, out: NDArray, layer: int, address: int) -> None:
        """Copy a layer's keys, values or norms from the device. ``out``: a contiguous array ``[kv_heads, n, ..]``."""
        width = out[0].nbytes
        pitch = int(self.capacities[layer]) * (width // max(1, out.shape[1]))
        self.kernels.driver.copy_rows(out, width, address, pitch, width, len(out))
        self.kernels.driver.main.synchronize()

    def reserve(self, n: int) -> None:
        super().reserve(n)
        self._reserved = n

    def abort(self) -> None:
        super().abort()
        for layer, length in enumerate(self.lengths):
            self._clear(layer, int(length), int(length) + self._reserved)
        self.kernels.driver.main.synchronize()

    def append(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32], rows: Rows) -> None:
        wanted, start = (self.kv_heads, len(rows.kind), self.head_dim), self._length(layer)
        self._require(key, value, np.dtype(np.float32), wanted)
        tiny = np.zeros((*wanted[:2], 2), np.float32)
        super()._append(layer, tiny, tiny, *rows.arrays)
        self._write(layer, start, key, value)

    def rollback(self, mark: Mark) -> None:
        before = self.lengths
        super().rollback(mark)
        for layer, (now, was) in enumerate(zip(self.lengths, before, strict=True)):
            self._clear(layer, int(now), int(was))
            self.known[layer] = min(self.known[layer], int(now))
        self.kernels.driver.main.synchronize()

    def evict(self, keep: Sequence[NDArray[np.bool_] | None]) -> int:
        before = self.lengths
        evicted = super().evict(keep)
        after = self.lengths
        moved = {layer: mask for layer, mask in enumerate(keep) if mask is not None and after[layer] < before[layer]}
        kernels.evict(self, moved, before)
        for layer in moved:
            self.known[layer] = int(after[layer]) if self.known[layer] == before[layer] else 0
        return evicted

    def shift(self, layer: int, position: NDArray[np.int32]) -> None:
        before = self.position(layer).copy()
        super().shift(layer, position)
        self._turn({layer: before})

    def reindex(self, prefix: int) -> int:
        before = {layer: self.position(layer).copy() for layer in range(self.layers)}
        following = super().reindex(prefix)
        self._turn(before)
        return following

    def load(self, layer: int, held: Mapping[str, NDArray]) -> None:
        wanted, was = (self.kv_heads, *np.shape(held["kind"])[1:], self.head_dim), self._length(layer)
        self._require(held["key"], held["value"], self.dtype, wanted)
        tiny = np.zeros((*wanted[:-1], 2), np.float16)
        super()._load(layer, tiny, tiny, *(held[name] for name in ROW_DTYPES))
        self.known[layer] = 0
        self._write(layer, 0, held["key"], held["value"])
        self._clear(layer, int(self.lengths[layer]), was)
        self.kernels.driver.main.synchronize()

    def held(self, layer: int) -> dict[str, NDArray]:
        """Return a layer's arrays by name: copies of the keys and values in host memory, and views of the other arrays."""
        held = KVCache.held(self, layer)
        return {name: array.copy() if isinstance(array, DeviceRows) else array for name, array in held.items()}

    def _length(self, layer: int) -> int:
        return self.seq(layer).shape[1]

    def _rows(self, layer: int, part: int) -> DeviceRows:
        shape = (self.kv_heads, self._length(layer), self.head_dim)
        return DeviceRows(self, layer, self.address[layer][part], shape)

    def _require(self, key: NDArray, value: NDArray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        for name, array in (("key", key), ("value", value)):
            require(name, array, dtype, shape)
            if array.size and array.strides[-1] != dtype.itemsize:
                raise CacheError(f"{name} must be contiguous in its last axis")

    def _write(self, layer: int, start: int, *numbers: NDArray) -> None:
        """Write keys and values, each ``[kv_heads, n, head_dim]``, to the device, rounded to the cache's dtype."""
        driver, pitch = self.kernels.driver, int(self.capacities[layer]) * self._row
        for address, array in zip(self.address[layer][:2], numbers, strict=True):
            with np.errstate(over="ignore"):  # numbers too large for float16 become infinite
                stored = np.ascontiguousarray(array, self.dtype)
            width = stored.shape[1] * self._row
            driver.copy_rows(address + start * self._row, pitch, stored, width, width, self.kv_heads)
            driver.main.synchronize()

    def _clear(self, layer: int, first: int, last: int) -> None:
        pitch, width = int(self.capacities[layer]) * self._row, max(0, last - first) * self._row
        for address in self.address[layer][:2]:
            self.kernels.driver.clear(address + first * self._row, pitch, width, self.kv_heads)

    def _turn(self, before: Mapping[int, NDArray[np.int32]]) -> None:
        by = {layer: self.position(layer) - was for layer, was in before.items()}
        if moved := {layer: steps for layer, steps in by.items() if steps.any()}:
            kernels.turn(self, moved)


CudaCache.__new__(CudaCache)  # makes pybind11 register the subclass now


def _ledger(
    capacities: list[int], kv_heads: int, head_dim: int, inv_freq: Any, axes: int, dtype: str, pair_axis: Any, local: Any
) -> tuple[Any, ...]:
    return capacities, kv_heads, 2, np.zeros(1), axes, "fp16", None if pair_axis is None else np.zeros(1, np.uint8)


def _starts(capacities: list[int], kv_heads: int, head_dim: int, dtype: np.dtype) -> list[Any]:
    """Return the offsets of each layer's keys, values and norms in the arena, in bytes, followed by the arena's size."""
    starts: list[Any] = []
    end = 0
    for rows in capacities:
        layer = []
        for width in (head_dim * dtype.itemsize, head_dim * dtype.itemsize, 4):
            layer.append(end)
            end += aligned(kv_heads * rows * width)
        starts.append(tuple(layer))
    return [*starts, end]
