"""Calls over the layers of a cache, all heads of all of them at once; eviction, new positions and norms are such calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cuda import calls
from edgevlm.runtime.cuda.calls import blocks, named
from edgevlm.runtime.cuda.views import require
from edgevlm.runtime.cuda.workspace import Call

if TYPE_CHECKING:
    from edgevlm.runtime.cuda.cache import CudaCache
    from edgevlm.runtime.cuda.kernels import Kernels

Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Masks = Sequence[NDArray[np.bool_]]


class Held(Protocol):
    """Layers of keys on a device, and what is known of their rows: a CudaCache, or what a caller gave of one layer."""

    @property
    def kernels(self) -> Kernels: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def axes(self) -> int: ...
    @property
    def inv_freq(self) -> NDArray[np.float64]: ...
    @property
    def pair_axis(self) -> NDArray[np.uint8] | None: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...

    def table(self, wanted: Sequence[int], lengths: NDArray[np.int32]) -> NDArray: ...
    def row(self, layer: int) -> NDArray[np.int16]: ...
    def col(self, layer: int) -> NDArray[np.int16]: ...
    def position(self, layer: int) -> NDArray[np.int32]: ...


class LayersCall:
    """A call over some layers of a cache: their table, and what is known of their rows by name, one layer behind another."""

    def __init__(self, cache: Held, layers: Sequence[int], lengths: NDArray[np.int32] | None = None) -> None:
        self.cache, self.kernels, self.layers = cache, cache.kernels, layers
        self.table = cache.table(layers, cache.lengths if lengths is None else lengths)
        self.lengths = [int(n) for n in self.table["rows"]]
        self.call = Call(self.kernels.space)
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
            self.call.room(name, self.total, dtype)

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


def evict(cache: CudaCache, keep: dict[int, Bool], lengths: NDArray[np.int32]) -> None:
    """Fill the holes of layers from their tails; keep: bool ``[kv_heads, n_l]``, as many of each head, of ``lengths`` rows."""
    work = LayersCall(cache, list(keep), lengths)
    kept = np.array([mask[0].sum() for mask in keep.values()], np.int32)
    moves = max((min(int(m), n - int(m)) for m, n in zip(kept, work.lengths, strict=True)), default=0)
    if not moves:
        return
    work.masks("keep", list(keep.values()))
    work.call.put("kept", kept)
    work.results(np.int32, "from_", "to")
    work.call.room("count", work.tasks, np.int32)
    work.call.send()
    at = work.at(calls.MovesCall, "keep", "kept", "from_", "to", "count")
    work.launch("list_moves", at, over=1)
    work.kernels.launch(
        named("move_rows", cache.dtype),
        (blocks(moves, at.rows.lanes), cache.kv_heads, len(keep)),
        at,
    )
    work.kernels.driver.main.synchronize()


def turn(cache: CudaCache, by: dict[int, NDArray[np.int32]]) -> None:
    """Turn the keys of layers by so many steps, int32 ``[kv_heads, n_l, axes]``."""
    work = LayersCall(cache, list(by))
    work.call.put("by", *by.values())
    work.put_turns()
    work.call.send()
    work.launch("turn_keys", work.at(calls.TurnCall, "by", how=work.turns(on=True)), of_rows=True)
    work.kernels.driver.main.synchronize()


def complete_norms(work: LayersCall, cache: CudaCache) -> None:
    """The norms of values that are not known yet, into the arena."""
    if any(cache.known[layer] < n for layer, n in zip(work.layers, work.lengths, strict=True)):
        work.launch("value_norms", work.at(calls.NormsCall), of_rows=True)
        for layer, n in zip(work.layers, work.lengths, strict=True):
            cache.known[layer] = n


def norms(cache: CudaCache, layer: int) -> Float32:
    """The norms of a layer's values, float32 ``[kv_heads, n_l]``, from the arena."""
    out = np.empty((cache.kv_heads, int(cache.lengths[layer])), np.float32)
    driver = cache.kernels.driver
    driver.copy_rows_out(out, cache.norm_address(layer), int(cache.capacities[layer]) * 4)
    driver.main.synchronize()
    return out
