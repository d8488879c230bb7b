"""The ring cache: one block of memory a stream, rows appended in place, evicted rows replaced from the tail.

The layout stands where it is allocated, in ``csrc/cache.cpp``; docs/internals/architecture.md says why rows are in no order.
Every misuse raises :class:`~edgevlm.errors.CacheError` before a byte is changed; rows that do not fit raise
:class:`~edgevlm.errors.CacheFull`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime import _native
from edgevlm.runtime._native import Mark
from edgevlm.runtime.engine import KVBuffer
from edgevlm.runtime.kv import DTYPES, KVScales

ROW_DTYPES = {
    "kind": np.uint8, "seq": np.int64, "frame": np.int32, "row": np.int16, "col": np.int16, "position": np.int32,
    "confirmed": np.int32,
}  # fmt: skip
"""What is known of a row beside its key and value, in the order of a layer's memory."""

PARTS = ("key", "value", *ROW_DTYPES)  # of a layer, in the order of its memory

__all__ = ["PARTS", "ROW_DTYPES", "KVCache", "Kind", "Mark", "Rows", "row_bytes"]


class Kind:
    """What a row is, stored as uint8 beside it. Plain numbers: numpy widens an array that it compares with an enum's."""

    PREFIX: Final = 0  # the system prompt and everything up to the first vision token: never evicted, outside |M|
    VISION: Final = 1
    SUMMARY: Final = 2  # made by a policy from what it evicted: counts in |M|
    TEXT: Final = 3  # a question, an answer, or text inside the stream


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of n new rows; the same in every layer and head. dtypes must be exactly those of :data:`ROW_DTYPES`, of
    which ``confirmed`` begins as the row's own frame.

    seq: the token's place in the stream. frame, row, col: its frame (-1 for text that belongs to none) and patch. position:
    rotary, not negative.
    """

    kind: NDArray[np.uint8]  # [n], see Kind
    seq: NDArray[np.int64]  # [n]
    frame: NDArray[np.int32]  # [n]
    row: NDArray[np.int16]  # [n]
    col: NDArray[np.int16]  # [n]
    position: NDArray[np.int32]  # [n, axes]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def arrays(self) -> tuple[NDArray, ...]:
        """The arrays, in the order above."""
        return tuple(getattr(self, name) for name in self.__slots__)

    @classmethod
    def text(cls, position: NDArray[np.int32], kind: int = Kind.TEXT, frame: int = -1) -> Rows:
        """Rows at positions ``[n, axes]`` that are no patches; their ``seq`` is 0 to n - 1."""
        count = len(position)
        zeros = np.zeros(count, np.int16)
        order = np.arange(count, dtype=np.int64)
        return cls(np.full(count, kind, np.uint8), order, np.full(count, frame, np.int32), zeros, zeros, position)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """One after the other."""
        return cls(*(np.concatenate(of) for of in zip(*(part.arrays for part in parts), strict=True)))


def row_bytes(axes: int) -> int:
    """Bytes of what is known of a row of one KV head, beside its key and value."""
    return sum(np.dtype(dtype).itemsize * (axes if name == "position" else 1) for name, dtype in ROW_DTYPES.items())


class KVCache:
    """Keys, values and metadata of one stream, allocated once.

    layers, kv_heads, head_dim: the decoder's. capacity: rows of every layer, or one number a layer. inv_freq: float64
    ``[head_dim / 2]``, the rotary frequencies that keys were rotated with. axes: of a position, 1, or 3 for M-RoPE (frame,
    row, column). sections: with 3 axes, how many rotary pairs turn by each, one after the other (Qwen2-VL: 16, 24, 24) or
    ``interleaved`` (Qwen3-VL); without them keys of 3 axes can be stored but not turned. dtype: of keys and values, ``fp32``,
    ``fp16`` or ``int8``, which needs ``scales`` (:mod:`edgevlm.runtime.kv`); keys are turned in float32 whatever it is.

    Arrays that methods return are read-only views that keep the cache alive. They show the rows valid when they were
    made: take them again after anything that adds, removes or moves rows. Rows past the valid ones are free:
    zero, or what an eviction has left there, never read by anyone.

    The long loops run without the GIL. Any number of threads may read a cache at once, one may change it: a call that would
    meet another's change raises CacheError, as does one given arrays of the memory it is to change.
    """

    _not_state = True  # a policy that refers to it is not charged for it

    __slots__ = ("axes", "dtype", "head_dim", "inv_freq", "kv_heads", "layers", "native", "pair_axis")

    def __init__(
        self,
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
        scales: KVScales | None = None,
    ) -> None:
        capacities = per_layer(layers, capacity)
        self.pair_axis = pair_axes(sections, interleaved, axes, head_dim // 2)
        if scales is not None and dtype != "int8":
            raise CacheError(f"scales go with int8, and dtype is {dtype}")
        shape = (capacities, kv_heads, head_dim, inv_freq, axes, dtype, self.pair_axis)
        self.native = _native.Cache(*shape, *((None, None) if scales is None else (scales.key, scales.value)))
        self.layers, self.kv_heads, self.head_dim, self.axes = layers, kv_heads, head_dim, axes
        self.dtype = DTYPES[dtype]
        self.inv_freq = inv_freq.copy()
        self.inv_freq.flags.writeable = False

    @staticmethod
    def bytes_for(
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
    ) -> int:
        """``nbytes`` of the cache that the same arguments would make. Allocates nothing."""
        pair_axis = pair_axes(sections, interleaved, axes, head_dim // 2)
        return _native.Cache.bytes_for(per_layer(layers, capacity), kv_heads, head_dim, inv_freq, axes, dtype, pair_axis)

    @property
    def nbytes(self) -> int:
        """Every byte of the cache: rows, metadata, and the working memory of its kernels."""
        return self.native.nbytes

    @property
    def allocations(self) -> int:
        """Blocks of memory the cache has ever allocated: one."""
        return self.native.allocations

    @property
    def rows_moved(self) -> int:
        """Rows (of one head) that evictions have moved since the cache was made: never more than they evicted."""
        return self.native.rows_moved

    @property
    def saturated(self) -> int:
        """Of all numbers added as int8, how many lay beyond their scale; 0 with other dtypes.

        Saturated values, and rotary pairs of keys longer than the largest code: some turn of such a pair saturates.
        """
        return self.native.saturated

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Valid rows of each layer, ``[layers]``, a copy. Reserved rows do not count."""
        return self.native.lengths

    @property
    def capacities(self) -> NDArray[np.int32]:
        """Rows each layer has room for, ``[layers]``."""
        return self.native.capacities

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole block, ``[nbytes]``, read-only."""
        return self.native.memory

    def buffers(self) -> list[KVBuffer]:
        """One buffer a layer, for an engine to bind once and append to between :meth:`reserve` and :meth:`commit`."""
        return [
            KVBuffer(
                key_address=self.native.key_address(layer),
                value_address=self.native.value_address(layer),
                shape=(1, self.kv_heads, int(rows), self.head_dim),
                dtype=self.dtype,
                owner=self,
                key_scale=self.key_scale(layer),
                value_scale=self.value_scale(layer),
            )
            for layer, rows in enumerate(self.capacities)
        ]

    # What a layer holds: views of its n valid rows.

    def key(self, layer: int) -> NDArray[np.number]:
        """Keys as stored, rotated: ``[kv_heads, n, head_dim]``, of ``dtype``; codes, if that is int8."""
        return self.native.key(layer)

    def value(self, layer: int) -> NDArray[np.number]:
        """Values ``[kv_heads, n, head_dim]``, of ``dtype``."""
        return self.native.value(layer)

    def key_scale(self, layer: int) -> NDArray[np.float32] | None:
        """What an int8 key counts, by channel: float32 ``[kv_heads, head_dim]``; None with other dtypes."""
        return self.native.key_scale(layer)

    def value_scale(self, layer: int) -> NDArray[np.float32] | None:
        """What an int8 value counts, by channel: float32 ``[kv_heads, head_dim]``; None with other dtypes."""
        return self.native.value_scale(layer)

    def dequantize(
        self, part: Literal["key", "value"], layer: int, rows: slice | NDArray[np.bool_] = slice(None)
    ) -> NDArray[np.float32]:
        """Keys or values as float32, whatever ``dtype``: ``[kv_heads, m, head_dim]`` of the ``rows`` named, a copy."""
        stored, scale = (self.key, self.key_scale) if part == "key" else (self.value, self.value_scale)
        return _native.dequantize(stored(layer)[:, rows], scale(layer))

    def kind(self, layer: int) -> NDArray[np.uint8]:
        """:class:`Kind` of each row, ``[kv_heads, n]``."""
        return self.native.kind(layer)

    def seq(self, layer: int) -> NDArray[np.int64]:
        """Each token's place in the stream, ``[kv_heads, n]``."""
        return self.native.seq(layer)

    def frame(self, layer: int) -> NDArray[np.int32]:
        """Each token's frame, ``[kv_heads, n]``."""
        return self.native.frame(layer)

    def row(self, layer: int) -> NDArray[np.int16]:
        """Each token's patch row, ``[kv_heads, n]``."""
        return self.native.row(layer)

    def col(self, layer: int) -> NDArray[np.int16]:
        """Each token's patch column, ``[kv_heads, n]``."""
        return self.native.col(layer)

    def position(self, layer: int) -> NDArray[np.int32]:
        """The rotary position each key is rotated to, ``[kv_heads, n, axes]``."""
        return self.native.position(layer)

    def confirmed(self, layer: int) -> NDArray[np.int32]:
        """The frame that last showed what each row shows, ``[kv_heads, n]``: its own, or a later one, see :meth:`confirm`."""
        return self.native.confirmed(layer)

    def value_norms(self, layer: int) -> NDArray[np.float32]:
        """The L2 norm of each value, ``[kv_heads, n]``: kept with the row, so that a value is read for it once in its life."""
        return self.native.value_norms(layer)

    # Appending.

    def reserve(self, n: int) -> None:
        """Set aside rows ``[n_l, n_l + n)`` of every layer for an engine to write.

        Raises CacheFull, with nothing reserved, if a layer has no room; CacheError if rows are reserved already.
        """
        self.native.reserve(n)

    def commit(self, rows: Rows) -> None:
        """Commit the reserved rows. If ``rows`` is refused they stay reserved: abort, or commit corrected ones."""
        self.native.commit(*rows.arrays)

    def abort(self) -> None:
        """Forget the reserved rows, and whatever an engine has written there."""
        self.native.abort()

    def append(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32], rows: Rows) -> None:
        """Add rows that a policy made to one layer.

        key (rotated to ``rows.position``), value: float32 ``[kv_heads, n, head_dim]``, dense in the last axis, whatever
        ``dtype`` they are stored in.
        Marks taken before are stale. Raises CacheFull if the layer has no room.
        """
        self.native.append(layer, key, value, *rows.arrays)

    def mark(self) -> Mark:
        """This moment, to :meth:`rollback` to."""
        return self.native.mark()

    def rollback(self, mark: Mark) -> None:
        """Take out all rows committed since ``mark``; it can be used again.

        Raises CacheError if the mark is stale: since it was taken rows were evicted or shifted, or appended to one
        layer, or the rows it stands on were rolled back.
        """
        self.native.rollback(mark)

    def confirm(self, seq: NDArray[np.int64], frame: int) -> None:
        """Note that ``frame`` shows what these tokens show: the one of each patch, ``[rows, columns]``, -1 for none.

        Tokens that are in the memory no longer are passed over.
        """
        self.native.confirm(seq, frame)

    # Compressing.

    def evict(self, keep: Sequence[NDArray[np.bool_] | None]) -> int:
        """Drop the rows that ``keep[layer]``, bool ``[kv_heads, n_l]``, leaves out; None leaves a layer as it is.

        Every head of a layer must keep the same number m of rows. The k-th hole among the first m rows is filled with
        the k-th kept row behind them: as many rows move as there are holes. Returns the rows evicted, summed over
        layers.
        """
        return self.native.evict(list(keep))

    def shift(self, layer: int, position: NDArray[np.int32]) -> None:
        """Give the rows of a layer new positions, int32 ``[kv_heads, n_l, axes]``, and rotate their keys to them.

        float32 on rotate-half pairs ``(d, d + head_dim / 2)``, by float64 angles ``(new - old) * inv_freq``, on 3 axes each
        pair by its own axis.
        """
        self.native.shift(layer, position)

    def reindex(self, prefix: int) -> int:
        """Make positions dense: in each layer and head, those from ``prefix`` on become ``prefix`` + their rank.

        Rows of one position stay together; positions below ``prefix`` stay (InfiniPot-V App. B.4, HERMES App. F). On 3 axes
        each axis by itself. Returns the next free position, 1 + the largest over all layers, heads and axes.
        """
        return self.native.reindex(prefix)

    # Snapshots.

    def held(self, layer: int) -> dict[str, NDArray]:
        """All that a layer holds, by the names of :data:`PARTS`: views as the methods of those names give them."""
        return {name: getattr(self, name)(layer) for name in PARTS}

    def load(self, layer: int, held: Mapping[str, NDArray]) -> None:
        """Hold just these rows in a layer, in this order: what :meth:`held` showed of a cache of the same shape.

        Marks taken before are stale. Raises CacheFull if the layer has no room, CacheError for other shapes or dtypes.
        """
        self.native.load(layer, *(held[name] for name in PARTS))


def pair_axes(sections: Sequence[int] | None, interleaved: bool, axes: int, pairs: int) -> NDArray[np.uint8] | None:
    """The position axis that each of ``pairs`` rotary pairs turns by, uint8 ``[pairs]``; None without sections.

    ``interleaved``: axes take turns, 0 1 2 0 1 2, until a later one has had its section; what is left is axis 0.
    """
    if sections is None:
        return None
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


def per_layer(layers: int, capacity: int | Sequence[int]) -> list[int]:
    """Rows of each layer, of one number for all or one for each; raises CacheError for other counts and other than numbers."""
    capacities = list(capacity) if isinstance(capacity, Sequence | np.ndarray) else [capacity] * layers
    if len(capacities) != layers:
        raise CacheError(f"capacity must be one number, or one for each of the {layers} layers, not {len(capacities)}")
    if any(isinstance(rows, bool) or not isinstance(rows, int | np.integer) for rows in capacities):
        raise CacheError(f"capacity must be integers (rows), not {capacities}")
    return [int(rows) for rows in capacities]
