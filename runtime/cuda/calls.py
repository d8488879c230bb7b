"""Call edgevlm's CUDA kernels, whose arguments are structs that point to arrays in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint64
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError

Masks = Sequence[NDArray[np.bool_]]
DeviceCache = Any  # a CudaCache; its module imports this module

ALIGNMENT = 256  # bytes
THREADS = 256
TILE = 64  # rows per thread block in a matrix product

# The structs have the same fields as in ``csrc/*.cu``. Addresses are in device memory.
LAYER = np.dtype(
    [
        *((name, np.uint64) for name in ("key", "value", "norm")),
        *((name, np.int64) for name in ("capacity", "norm_stride", "first")),
        *((name, np.int32) for name in ("rows", "known")),
    ]
)
_TWO_PI = Fraction(Decimal("6.283185307179586476925286766559005768394338798750211641949889"))


def _struct(name: str, *fields: str | tuple[type, str]) -> type[ctypes.Structure]:
    typed = [(c_uint64, field) if isinstance(field, str) else field for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": [(each, kind) for kind, names in typed for each in names.split()]})


Rows = _struct("Rows", "layers", (c_int32, "heads pairs lanes wide"))
Turns = _struct("Turns", "turns axis", (c_int32, "axes on"))
NormsCall = _struct("NormsCall", (Rows, "rows"))
TurnCall = _struct("TurnCall", (Rows, "rows"), (Turns, "how"), "by")
MovesCall = _struct("MovesCall", (Rows, "rows"), "keep kept from_ to count")
PoolCall = _struct("PoolCall", (Rows, "rows"), "frame row col valid window out slots count", (c_int32, "slot_count"))
SimilarityCall = _struct(
    "SimilarityCall",
    *((Rows, "rows"), (Turns, "how"), "position row col recent valid out slots patch count latest patches sum mean"),
    (c_int32, "slot_count most_patches"),
)
ChooseCall = _struct(
    "ChooseCall",
    *((Rows, "rows"), "similarity pooled seq prefix vision recent keep open chosen thresholds window"),
    (c_int32, "distinctive target keep_recent"),
)
NewerCall = _struct("NewerCall", (Rows, "rows"), (Turns, "how"), "position order held news unit out")
AttentionCall = _struct(
    "AttentionCall",
    *((Rows, "rows"), "query query_seq seq scores highest weight mass", (c_int64, "seq_stride columns")),
    (c_int32, "column all first queries"),
)


def named(kernel: str, dtype: np.dtype) -> str:
    return f"{kernel}_{'fp16' if dtype == np.float16 else 'fp32'}"


def blocks(rows: int, lanes: int = 1) -> int:
    return max(1, -(-rows * lanes // THREADS))


def slots_for(rows: int) -> int:
    """Return the size, a power of two, of a hash table that is at most half full with ``rows`` keys."""
    return 1 << max(5, (2 * rows).bit_length())


@lru_cache(maxsize=16)
def turns_of(*inv_freq: float) -> NDArray[np.uint64]:
    """Return the angle by which each rotary pair turns per position, as a 64-bit fraction of a full turn.

    Integer overflow drops full turns, so the product of this fraction and a number of positions is exact.
    """
    full = 1 << 64
    return np.array([round(Fraction(f) / _TWO_PI * full) % full for f in inv_freq], np.uint64)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A layer's keys or values in device memory, ``[kv_heads, n, head_dim]``.

    :mod:`edgevlm.runtime.kernels` accepts this object in place of an array. Indexing the object, or using it as an array
    elsewhere, copies the rows to host memory. The object keeps a reference to the cache.
    """

    cache: DeviceCache = field(repr=False)
    layer: int
    address: int
    shape: tuple[int, int, int]

    @property
    def dtype(self) -> np.dtype:
        found: np.dtype = self.cache.dtype
        return found

    @property
    def kernels(self) -> Any:
        return self.cache.kernels

    def copy(self) -> NDArray:
        """Return a contiguous copy of the rows in host memory."""
        out = np.empty(self.shape, self.dtype)
        self.cache.copy_out(out, self.layer, self.address)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self.copy().astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> NDArray:
        return self.copy()[index]

    def __len__(self) -> int:
        return self.shape[0]


def require(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise CacheError(f"{name} must be {dtype}, not {getattr(array, 'dtype', type(array).__name__)}")
    if array.shape != shape:
        raise CacheError(f"{name} must be {list(shape)}, not {list(array.shape)}")


class KernelCall:
    """Runs kernels over some layers of a cache, and manages the kernels' arrays in device memory.

    Declare arrays first, then call :meth:`send`, :meth:`launch` and :meth:`fetch`. ``lengths``: each layer's number of rows, by
    default the number in the cache.
    """

    def __init__(self, cache: DeviceCache, layers: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        self.cache, self.kernels, self.layers = cache, cache.kernels, layers
        self.lengths = [int(cache.lengths[layer]) for layer in layers] if lengths is None else list(lengths)
        self.total = sum(self.lengths) * cache.kv_heads  # the number of rows in all layers and heads
        self.tasks = len(layers) * cache.kv_heads
        self._inputs: dict[str, Sequence[NDArray]] = {"layers": [cache.table(layers, self.lengths)]}
        self._made: dict[str, tuple[int, np.dtype]] = {}  # arrays on the device: size and dtype
        self._zeroed: set[str] = set()
        self._address: dict[str, int] = {}

    def put(self, name: str, *arrays: NDArray) -> None:
        """Declare an input. Several arrays of the same dtype are stored one after another."""
        self._inputs[name] = arrays

    def know(self, *names: str) -> None:
        for name in names:
            self.put(name, *(getattr(self.cache, name)(layer) for layer in self.layers))

    def masks(self, name: str, masks: Masks) -> None:
        """Declare one mask per layer as an input. Each mask is bool ``[kv_heads, n]``."""
        for mask, n in zip(masks, self.lengths, strict=True):
            require(name, mask, np.dtype(np.bool_), (self.cache.kv_heads, n))
        self.put(name, *masks)

    def turns(self) -> None:
        """Declare the inputs with which kernels rotate keys."""
        axis = np.zeros(len(self.cache.inv_freq), np.uint8) if self.cache.pair_axis is None else self.cache.pair_axis
        self.put("turns", turns_of(*self.cache.inv_freq.tolist()))
        self.put("axis", np.ascontiguousarray(axis))

    def make(self, dtype: type[np.generic], *names: str, size: int | None = None, zero: bool = False) -> None:
        """Declare arrays that kernels write.

        ``size``: how many numbers each array has, by default one per row. ``zero``: whether to clear the arrays first.
        """
        for name in names:
            self._made[name] = self.total if size is None else size, np.dtype(dtype)
            self._zeroed.update([name] if zero else [])

    def lay_out(self) -> None:
        """Assign an address to each array. Inputs may still change until :meth:`send` is called."""
        sizes = {name: aligned(sum(array.nbytes for array in arrays)) for name, arrays in self._inputs.items()}
        self._sent = sum(sizes.values())
        made = sorted(self._made, key=lambda name: name not in self._zeroed)
        sizes |= {name: aligned(self._made[name][0] * self._made[name][1].itemsize) for name in made}
        self._base = at = self.kernels.memory.block("device", sum(sizes.values()), None).address
        for name, size in sizes.items():
            self._address[name], at = at, at + size
        self._cleared = sum(sizes[name] for name in self._zeroed)

    def send(self) -> None:
        """Copy the inputs to the device, and clear the arrays that must start at zero."""
        if not self._address:
            self.lay_out()
        host, driver = self._host(self._sent), self.kernels.driver
        for name, arrays in self._inputs.items():
            start = self[name] - self._base
            for array in arrays:
                np.copyto(host[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
                start += array.nbytes
        driver.copy_in(self._base, host)
        driver.clear(self._base + self._sent, self._cleared, self._cleared, 1)

    def __getitem__(self, name: str) -> int:
        return self._address[name]

    def at(self, kind: type[ctypes.Structure], *, turned: bool = True, **others: Any) -> Any:
        """Return a kernel's arguments: the declared arrays' addresses, and the values in ``others``.

        ``turned``: whether the kernel rotates the keys.
        """
        cache, pairs, each = self.cache, self.cache.head_dim // 2, 16 // self.cache.dtype.itemsize
        wide = pairs % each == 0
        lanes = min(32, 1 << max(0, -(-pairs // (each if wide else 1)) - 1).bit_length())  # lanes that read a row together
        given = {"rows": Rows(layers=self["layers"], heads=cache.kv_heads, pairs=pairs, lanes=lanes, wide=wide)}
        if "turns" in self._inputs:
            given["how"] = Turns(turns=self["turns"], axis=self["axis"], axes=cache.axes, on=turned)
        given |= self._address | others
        return kind(**{name: given[name] for name, *_ in kind._fields_})

    def launch(self, name: str, arguments: Any, *, of_rows: bool = False, over: int | None = None) -> None:
        """Launch a kernel over every layer and head, by default with one thread per row.

        ``of_rows``: whether to use several threads per row. ``over``: the number of thread blocks for each layer and head.
        """
        longest = max(self.lengths, default=0)
        across = blocks(longest, arguments.rows.lanes) if of_rows else over or blocks(longest)
        kernel = named(name, self.cache.dtype) if of_rows else name
        self.kernels.launch(kernel, (across, self.cache.kv_heads, len(self.layers)), arguments)

    def fetch(self, name: str) -> list[NDArray]:
        """Wait for the kernels, and return a copy of an array with one number per row, split into ``[kv_heads, n]`` for each
        layer.
        """
        size, dtype = self._made[name]
        host, driver = self._host(size * dtype.itemsize), self.kernels.driver
        driver.copy_out(host, self[name])
        driver.main.synchronize()
        flat, heads = host.view(dtype).copy(), self.cache.kv_heads
        ends = np.cumsum([heads * n for n in self.lengths])
        return [part.reshape(heads, n) for part, n in zip(np.split(flat, ends[:-1]), self.lengths, strict=True)]

    def _host(self, nbytes: int) -> NDArray[np.uint8]:
        host = self.kernels.memory.block("host", nbytes, True).host
        assert host is not None
        return host[:nbytes]
