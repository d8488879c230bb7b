"""Keep a stream's keys and values in one block of memory. Rows are appended in place; rows from the end replace evicted rows.

``csrc/cache.cpp`` describes the layout; docs/internals/architecture.md explains why rows are unordered. Every misuse raises
CacheError before the cache is changed. Appending rows that do not fit raises CacheFull.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime import _native
from edgevlm.runtime._native import Mark as Mark
from edgevlm.runtime.bundle import DecoderSpec
from edgevlm.runtime.engine import KVBuffer, Sight
from edgevlm.runtime.kv import DTYPES, KVScales

ROW_DTYPES = {
    "kind": np.uint8, "seq": np.int64, "frame": np.int32, "row": np.int16, "col": np.int16, "position": np.int32,
    "confirmed": np.int32,
}  # fmt: skip
"""The dtypes of a row's metadata, in the order of a layer's memory."""

Bytes = NDArray[np.uint8]
NativeShape = tuple[list[int], int, int, NDArray[np.float64], int, str, Bytes | None, Bytes | None]
PARTS = ("key", "value", *ROW_DTYPES)  # a layer's arrays, in memory order


class Kind:
    """The kinds of rows. They are plain ints, because comparing an array with an enum widens the array."""

    PREFIX: Final = 0  # all rows before the first vision token, which are never evicted and do not count towards |M|
    VISION: Final = 1
    SUMMARY: Final = 2  # a row that a policy made from rows that it evicted; counts towards |M|
    TEXT: Final = 3


@dataclass(frozen=True, slots=True)
class Rows:
    """The metadata of new rows, which all layers and heads share.

    All arrays are ``[n]``, except ``position``. ``kind``: numbers from :class:`Kind`. ``seq``: each token's number in the
    stream. ``frame``: the number of the token's frame, or -1 for text outside frames. ``row``, ``col``: the grid row and column
    of the token's patch. ``position``: rotary positions, ``[n, axes]``, never negative. In the cache, a new row's ``confirmed``
    is its ``frame``.
    """

    kind: NDArray[np.uint8]
    seq: NDArray[np.int64]
    frame: NDArray[np.int32]
    row: NDArray[np.int16]
    col: NDArray[np.int16]
    position: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def arrays(self) -> tuple[NDArray, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    @classmethod
    def text(cls, position: NDArray[np.int32], kind: int = Kind.TEXT, frame: int = -1) -> Rows:
        """Return the metadata of text rows, whose ``seq`` begins at 0. ``position``: ``[n, axes]``."""
        count = len(position)
        zeros = np.zeros(count, np.int16)
        order = np.arange(count, dtype=np.int64)
        return cls(np.full(count, kind, np.uint8), order, np.full(count, frame, np.int32), zeros, zeros, position)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        return cls(*(np.concatenate(of) for of in zip(*(part.arrays for part in parts), strict=True)))


def row_bytes(axes: int) -> int:
    return sum(np.dtype(dtype).itemsize * (axes if name == "position" else 1) for name, dtype in ROW_DTYPES.items())


class KVCache(_native.Cache):
    """The keys, values and metadata of one stream, allocated once. ``csrc/bindings.cpp`` documents the inherited methods.

    ``capacity``: the number of rows in each layer, either one number for all layers or a list. ``inv_freq``: the rotary
    frequencies of keys, float64 ``[head_dim / 2]``. If some layers are ``local``, their frequencies follow in the same array.
    ``axes``: the number of axes of a position: 1, or 3 for M-RoPE (frame, row, column). ``sections``: with 3 axes, how many
    rotary pairs each axis rotates, in blocks (Qwen2-VL: 16, 24, 24) or ``interleaved`` (Qwen3-VL). Without ``sections``, keys
    with 3 axes can be stored but not rotated. ``dtype``: the type of keys and values, ``fp32``, ``fp16`` or ``int8``, which
    needs ``scales`` (:mod:`edgevlm.runtime.kv`). With every ``dtype``, keys are rotated in float32.

    Arrays that methods return are read-only views that keep the cache alive. A view shows the rows that were valid when it was
    made: take a new view after anything that adds, removes or moves rows. Rows after the valid ones are free and never read;
    they hold zeros or evicted values.

    The cache's long loops run without the GIL. Any number of threads may read a cache at once; only one may change it. A method
    raises CacheError if another thread is changing the cache, or if its arguments are views of the memory that it changes.
    """

    __slots__ = ("axes", "dtype", "head_dim", "inv_freq", "kv_heads", "layers", "local", "pair_axis")

    def __init__(self, *shape: Any, scales: KVScales | None = None, **rotary: Any) -> None:
        native = native_shape(*shape, **rotary)
        if scales is not None and native[5] != "int8":
            raise CacheError(f"scales require dtype int8, not {native[5]}")
        super().__init__(*native, *((None, None) if scales is None else (scales.key, scales.value)))
        self._describe(native)

    def _describe(self, native: NativeShape) -> None:
        capacities, self.kv_heads, self.head_dim, inv_freq, self.axes, dtype, self.pair_axis, self.local = native
        self.layers, self.dtype, self.inv_freq = len(capacities), DTYPES[dtype], inv_freq.copy()
        self.inv_freq.flags.writeable = False

    @classmethod
    def bytes_for(cls, *shape: Any, **rotary: Any) -> int:
        """Return the size (``nbytes``) of a cache with these arguments, without allocating it."""
        return _native.Cache._bytes_for(*native_shape(*shape, **rotary))

    def frequencies(self, layer: int) -> NDArray[np.float64]:
        """Return the rotary frequencies of a layer, float64 ``[head_dim / 2]``."""
        pairs = self.head_dim // 2
        return self.inv_freq[:pairs] if self.local is None or not self.local[layer] else self.inv_freq[pairs:]

    def buffers(self) -> list[KVBuffer]:
        """Return one buffer per layer. An engine appends to the buffers between :meth:`reserve` and :meth:`commit`."""
        return [
            KVBuffer(
                key_address=self.key_address(layer),
                value_address=self.value_address(layer),
                shape=(1, self.kv_heads, int(rows), self.head_dim),
                dtype=self.dtype,
                owner=self,
                key_scale=self.key_scale(layer),
                value_scale=self.value_scale(layer),
            )
            for layer, rows in enumerate(self.capacities)
        ]

    def dequantize(
        self, part: Literal["key", "value"], layer: int, rows: slice | NDArray[np.bool_] = slice(None)
    ) -> NDArray[np.float32]:
        """Return a copy of a layer's keys or values, or of some of their rows, as float32 ``[kv_heads, m, head_dim]``."""
        stored, scale = (self.key, self.key_scale) if part == "key" else (self.value, self.value_scale)
        return _native.dequantize(stored(layer)[:, rows], scale(layer))

    def commit(self, rows: Rows) -> None:
        """Commit the reserved rows. After an error they stay reserved: call ``abort``, or commit valid rows."""
        self._commit(*rows.arrays)

    def append(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32], rows: Rows) -> None:
        """Add a policy's own rows to one layer.

        ``key``, ``value``: float32 ``[kv_heads, n, head_dim]``, dense in the last axis, for any ``dtype`` of the cache. Keys
        are rotated to ``rows.position``. Results of :meth:`mark` become invalid. Raises CacheFull if the rows do not fit.
        """
        self._append(layer, key, value, *rows.arrays)

    def held(self, layer: int) -> dict[str, NDArray]:
        """Return views of all arrays of a layer, keyed by the names in :data:`PARTS`."""
        return {name: getattr(self, name)(layer) for name in PARTS}

    def load(self, layer: int, held: Mapping[str, NDArray]) -> None:
        """Replace a layer's rows with what :meth:`held` returned for a cache of the same shape.

        Results of :meth:`mark` become invalid. Raises CacheFull if rows do not fit, CacheError for a wrong shape or type.
        """
        self._load(layer, *(held[name] for name in PARTS))


KVCache.__new__(KVCache)  # pybind11 registers a subclass on its first instance, so make one while memory is free


def sight_of(decoder: DecoderSpec, cache: KVCache, rows: Rows) -> dict[str, Any]:
    """Return the extra arguments of :meth:`Decoder.step` for a decoder that is not causal, or an empty dict."""
    if decoder.is_causal:
        return {}
    vision, until = rows.kind == Kind.VISION, np.arange(1, len(rows) + 1, dtype=np.int32)
    for frame in np.unique(rows.frame[vision]) if decoder.whole_frames else ():
        own = np.flatnonzero(vision & (rows.frame == frame))
        until[own] = own[-1] + 1
    return {"sight": Sight(until, rows.position[:, 0], [cache.position(layer)[..., 0] for layer in range(cache.layers)])}


def native_shape(
    layers: int,
    kv_heads: int,
    head_dim: int,
    capacity: int | Sequence[int],
    *,
    inv_freq: NDArray[np.float64],
    axes: int = 1,
    dtype: str = "fp32",
    sections: Sequence[int] | None = None,
    interleaved: bool = False,
    local: Sequence[int] | None = None,
) -> NativeShape:
    """Return the arguments of the C++ cache, without scales. Raises CacheError if the arguments contradict each other."""
    rows = list(capacity) if isinstance(capacity, Sequence | np.ndarray) else [capacity] * layers
    if len(rows) != layers:
        raise CacheError(f"capacity must be one number, or one for each of the {layers} layers, not {len(rows)}")
    if any(isinstance(each, bool) or not isinstance(each, int | np.integer) for each in rows):
        raise CacheError(f"capacity must be integers (rows), not {rows}")
    pair_axis = None if sections is None else pair_axes(sections, interleaved, axes, head_dim // 2)
    second = None if local is None else np.array(local, np.uint8)
    return list(map(int, rows)), kv_heads, head_dim, inv_freq, axes, dtype, pair_axis, second


def pair_axes(sections: Sequence[int], interleaved: bool, axes: int, pairs: int) -> NDArray[np.uint8]:
    """Return which axis of the position rotates each rotary pair, uint8 ``[pairs]``.

    ``interleaved``: whether the axes take turns (0 1 2 0 1 2). Once axis 1 or 2 has all the pairs that ``sections`` gives it,
    axis 0 also takes that axis's turns.
    """
    if len(sections) != axes or sum(sections) != pairs or min(sections) < 0:
        raise CacheError(f"sections must be {axes} numbers that add up to head_dim / 2 = {pairs}, not {list(sections)}")
    if not interleaved:
        return np.repeat(np.arange(axes, dtype=np.uint8), sections)
    axis_of = np.zeros(pairs, np.uint8)
    for axis in range(1, axes):
        axis_of[axis : sections[axis] * axes : axes] = axis
    if np.bincount(axis_of, minlength=axes).tolist() != list(sections):
        raise CacheError(f"sections {list(sections)} cannot be interleaved over {pairs} pairs")
    return axis_of
