"""What a call of our kernels is made of: structs, arrays of the host and of the device, and the rows they are about.

A call's inputs lie side by side in device memory, so that one copy takes them there; what must be zero lies behind them, so
that one call clears it. That memory grows to the largest call there was and stays.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint64
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime.cuda.driver import DeviceMemory, Driver

Masks = Sequence[NDArray[np.bool_]]

ALIGNMENT = 256  # bytes
THREADS = 256  # of every block
TILE = 64  # rows of a block that multiplies matrices

# Structs are field by field as ``csrc/*.cu`` have them; addresses are of the device.
LAYER = np.dtype(
    [
        *((name, np.uint64) for name in ("key", "value", "norm")),
        *((name, np.int64) for name in ("capacity", "norm_stride", "first")),
        *((name, np.int32) for name in ("rows", "known")),
    ]
)
_TWO_PI = Fraction(Decimal("6.283185307179586476925286766559005768394338798750211641949889"))


def _struct(name: str, *fields: str | tuple[type, str]) -> type[ctypes.Structure]:
    """A struct of some names each: addresses, or of the type that comes with them."""
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
    """The kernel for rows of a dtype."""
    return f"{kernel}_{'fp16' if dtype == np.float16 else 'fp32'}"


def lanes_of(pairs: int, each: int) -> int:
    """Lanes that read a row of ``pairs`` rotary pairs together, ``each`` numbers a load: a power of two, 32 at most."""
    return min(32, 1 << max(0, -(-pairs // each) - 1).bit_length())


def blocks(rows: int, lanes: int = 1) -> int:
    """Blocks over ``rows`` rows of ``lanes`` lanes each; at least one."""
    return max(1, -(-rows * lanes // THREADS))


def slots_for(rows: int) -> int:
    """Slots of a table that ``rows`` keys can be found in: a power of two, no more than half full."""
    return 1 << max(5, (2 * rows).bit_length())


def turns_of(inv_freq: NDArray[np.float64]) -> NDArray[np.uint64]:
    """How far each rotary pair turns with one step, in 2^-64 of a full turn, uint64 ``[pairs]``: exact, whatever the step.

    A product with the number of steps wraps around just where the circle does.
    """
    return np.array(_turns(tuple(inv_freq.tolist())), np.uint64)


@lru_cache(maxsize=16)
def _turns(inv_freq: tuple[float, ...]) -> tuple[int, ...]:
    full = 1 << 64
    return tuple(round(Fraction(f) / _TWO_PI * full) % full for f in inv_freq)


def aligned(nbytes: int) -> int:
    """``nbytes`` up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class KernelWorkspace:
    """Device memory for one call at a time, and the page-locked host memory that its inputs and results go through."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._held: dict[str, DeviceMemory] = {}
        weakref.finalize(self, _free_all, driver, self._held)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._held.values())

    def device(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes; what was in them is lost."""
        return self._at_least("device", nbytes, mapped=None).address

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """uint8 ``[nbytes]`` that the device copies from and to at full speed."""
        host = self._at_least("host", nbytes, mapped=True).host
        assert host is not None
        return host[:nbytes]

    def _at_least(self, name: str, nbytes: int, mapped: bool | None) -> DeviceMemory:
        held = self._held.get(name)
        if held is not None and held.nbytes >= nbytes:
            return held
        if held is not None:
            self.driver.main.synchronize()  # what was asked of it may not be done
            self.driver.free(self._held.pop(name))
        self._held[name] = self.driver.allocate(aligned(max(nbytes, ALIGNMENT)), mapped)
        return self._held[name]


def _free_all(driver: Driver, held: dict[str, DeviceMemory]) -> None:
    for memory in held.values():
        driver.free(memory)
    held.clear()


class KernelCall:
    """The arrays of one call by name. Name all of them, then :meth:`lay_out` gives each its address, ``call[name]``."""

    def __init__(self, space: KernelWorkspace) -> None:
        self._space = space
        self._inputs: dict[str, Sequence[NDArray]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # of what is made on the device
        self._zeroed: set[str] = set()
        self._address: dict[str, int] = {}
        self._base = self._sent = self._cleared = 0  # where it lies, bytes of its inputs, bytes of what is zero

    def put(self, name: str, *arrays: NDArray) -> None:
        """Inputs of one dtype, one behind the other."""
        self._inputs[name] = arrays

    def scratch(self, name: str, shape: int | tuple[int, ...], dtype: type[np.generic], *, zero: bool = False) -> None:
        """An array to be written on the device, zero at the start if asked for."""
        self._shapes[name] = ((shape,) if isinstance(shape, int) else shape), np.dtype(dtype)
        if zero:
            self._zeroed.add(name)

    def lay_out(self) -> None:
        """Give every array its address; inputs may still change, in place."""
        sizes = {name: sum(array.nbytes for array in arrays) for name, arrays in self._inputs.items()}
        made = sorted(self._shapes, key=lambda name: name not in self._zeroed)
        sizes |= {name: int(np.prod(self._shapes[name][0], dtype=np.int64)) * self._shapes[name][1].itemsize for name in made}
        ends = np.cumsum([aligned(size) for size in sizes.values()], dtype=np.int64)
        base = self._space.device(int(ends[-1]) if len(ends) else 0)
        self._address = {name: base + int(end) - aligned(sizes[name]) for name, end in zip(sizes, ends, strict=True)}
        self._base, self._sent = base, int(ends[len(self._inputs) - 1]) if self._inputs else 0
        self._cleared = sum(aligned(sizes[name]) for name in self._zeroed)

    def send(self) -> None:
        """Take the inputs to the device and clear what is to be zero."""
        if not self._address:
            self.lay_out()
        driver = self._space.driver
        if self._sent:
            driver.copy_in(self._base, self._staged(self._sent))
        driver.clear(self._base + self._sent, self._cleared, self._cleared, 1)

    def __getitem__(self, name: str) -> int:
        return self._address[name]

    def fetch(self, name: str) -> NDArray:
        """What the device has made of an array, once all that was launched before is done; a copy."""
        shape, dtype = self._shapes[name]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        staged = self._space.host(size)
        self._space.driver.copy_out(staged, self[name])
        self._space.driver.main.synchronize()
        return staged.view(dtype).reshape(shape).copy()

    def _staged(self, nbytes: int) -> NDArray[np.uint8]:
        host = self._space.host(nbytes)
        for name, arrays in self._inputs.items():
            start = self[name] - self._base
            for array in arrays:
                into = host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(into, array)
                start += array.nbytes
        return host


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """``[kv_heads, n, head_dim]`` in device memory, heads ``capacity`` rows apart; keeps ``owner`` alive.

    :mod:`edgevlm.runtime.kernels` takes it wherever it takes an array of keys or values. All else, indexing too, makes a
    copy in the host's memory.
    """

    address: int
    shape: tuple[int, int, int]
    capacity: int
    dtype: np.dtype
    kernels: Any = field(repr=False)  # edgevlm.runtime.cuda.kernels.Kernels
    owner: object = field(repr=False, default=None)

    def copy(self) -> NDArray:
        """The rows in the host's memory, dense ``[kv_heads, n, head_dim]``."""
        heads, rows, width = self.shape
        out = np.empty(self.shape, self.dtype)
        if out.size:
            driver = self.kernels.driver
            driver.copy_rows_out(out.reshape(heads, rows * width), self.address, self.capacity * width * self.dtype.itemsize)
            driver.main.synchronize()
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self.copy().astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> NDArray:
        return self.copy()[index]

    def __len__(self) -> int:
        return self.shape[0]


def one_layer(rows: DeviceRows) -> NDArray:
    """The table of a call over just these rows, as keys and as values."""
    table = np.zeros(1, LAYER)
    table["key"] = table["value"] = rows.address
    table["capacity"], table["rows"] = rows.capacity, rows.shape[1]
    return table


def require(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise CacheError for anything but an array of this dtype and shape."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise CacheError(f"{name} must be {dtype}, not {getattr(array, 'dtype', type(array).__name__)}")
    if array.shape != shape:
        raise CacheError(f"{name} must be {list(shape)}, not {list(array.shape)}")


def require_rows(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """The same, and for rows that are not dense."""
    require(name, array, dtype, shape)
    if array.size and array.strides[-1] != dtype.itemsize:
        raise CacheError(f"{name} must be dense in its last axis")


class DeviceCache(Protocol):
    """A :class:`~edgevlm.runtime.cuda.cache.CudaCache`, as kernels use it."""

    layers: int
    kv_heads: int
    head_dim: int
    axes: int
    dtype: np.dtype
    inv_freq: NDArray[np.float64]
    pair_axis: NDArray[np.uint8] | None
    kernels: Any
    known: list[int]

    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def capacities(self) -> NDArray[np.int32]: ...
    def kind(self, layer: int) -> NDArray[np.uint8]: ...
    def seq(self, layer: int) -> NDArray[np.int64]: ...
    def frame(self, layer: int) -> NDArray[np.int32]: ...
    def row(self, layer: int) -> NDArray[np.int16]: ...
    def col(self, layer: int) -> NDArray[np.int16]: ...
    def norm_address(self, layer: int) -> int: ...
    def table(self, wanted: Sequence[int], lengths: NDArray[np.int32]) -> NDArray: ...


class LayersCall:
    """A call over layers of a cache, all heads at once: their table, and arrays of their rows, one layer after another."""

    def __init__(self, cache: DeviceCache, layers: Sequence[int], lengths: NDArray[np.int32] | None = None) -> None:
        self.cache, self.kernels, self.layers = cache, cache.kernels, layers
        self.table = cache.table(layers, cache.lengths if lengths is None else lengths)
        self.lengths = [int(n) for n in self.table["rows"]]
        self.call = KernelCall(self.kernels.space)
        self.call.put("layers", self.table)

    @property
    def total(self) -> int:
        """Rows of all layers and heads."""
        return sum(self.lengths) * self.cache.kv_heads

    @property
    def tasks(self) -> int:
        return len(self.layers) * self.cache.kv_heads

    def know(self, *names: str) -> None:
        """Send what the cache knows of its rows."""
        for name in names:
            self.call.put(name, *(getattr(self.cache, name)(layer) for layer in self.layers))

    def masks(self, name: str, masks: Masks) -> None:
        """Send a mask a layer, bool ``[kv_heads, n_l]``."""
        for mask, n in zip(masks, self.lengths, strict=True):
            require(name, mask, np.dtype(np.bool_), (self.cache.kv_heads, n))
        self.call.put(name, *masks)

    def results(self, dtype: type[np.generic], *names: str) -> None:
        """Room for an array of each row."""
        for name in names:
            self.call.scratch(name, self.total, dtype)

    def rows(self) -> Any:
        rows = self.kernels.rows(self.cache.head_dim, self.cache.dtype, self.table, self.call["layers"])
        rows.heads = self.cache.kv_heads
        return rows

    def launch(self, name: str, arguments: Any, *, of_rows: bool = False, over: int | None = None) -> None:
        """A kernel over every layer and head: a group of lanes a row of keys, with ``of_rows``; else ``over`` blocks, or a
        thread a row."""
        longest = max(self.lengths, default=0)
        across = blocks(longest, arguments.rows.lanes) if of_rows else over or blocks(longest)
        kernel = named(name, self.cache.dtype) if of_rows else name
        self.kernels.launch(kernel, (across, self.cache.kv_heads, len(self.layers)), arguments)

    def put_turns(self) -> None:
        self.kernels.put_turns(self.call, self.cache.inv_freq, self.cache.pair_axis)

    def turns(self, *, on: bool) -> Any:
        return self.kernels.turns(self.call, self.cache.axes, on=on)

    def fetch(self, name: str) -> list[NDArray]:
        """An array of :meth:`results`, ``[kv_heads, n_l]`` a layer."""
        heads, flat = self.cache.kv_heads, self.call.fetch(name)
        ends = np.cumsum([heads * n for n in self.lengths])
        return [part.reshape(heads, n) for part, n in zip(np.split(flat, ends[:-1]), self.lengths, strict=True)]

    def at(self, kind: Any, *names: str, **others: Any) -> Any:
        """A struct of addresses of this call's arrays and of what else it has."""
        return kind(rows=self.rows(), **{name: self.call[name] for name in names}, **others)
