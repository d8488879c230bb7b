"""Give a policy a view of one layer of the memory, with methods that keep, merge and add rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.kv import codes

if TYPE_CHECKING:
    from edgevlm.runtime.evidence import FrameTimes

Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows to add to one layer. ``key``, ``value``: ``[kv_heads, n, head_dim]``, with the key rotated to ``rows.position``."""

    key: Float32
    value: Float32
    rows: Rows


@dataclass(frozen=True, slots=True)
class Guidance:
    """The rotated queries and keys of the guidance texts, by layer.

    ``queries``: ``[heads, rows, head_dim]``. ``keys``: ``[kv_heads, rows, head_dim]``. ``rows``: each text's number of rows.
    """

    queries: Mapping[int, Float32]
    keys: Mapping[int, Float32]
    rows: tuple[int, ...]


Guide = Callable[[], Guidance]


class Queries(Protocol):
    """Queries kept from earlier calls, such as :class:`~edgevlm.runtime.policies.attention.QueryWindow`."""

    def at(self, layer: Layer) -> tuple[Float32, Int64]:
        """Return the queries, rotated to match the layer's keys, and the ``seq`` of each query.

        The queries have the shape ``[heads, m, head_dim]``, and ``seq`` has the shape ``[m]``.
        """


@dataclass(slots=True)
class Compression:
    """The data that all layers share during a compression.

    ``coming``: the number of rows about to be appended. ``first_frame``: whether frame 0 always stays. ``prepared``: the result
    of the policy's ``prepare``.
    """

    coming: int = 0
    texts: tuple[str, ...] = ()
    guide: Guide | None = None
    times: FrameTimes | None = None
    first_frame: bool = False
    prepared: Any = None


class Layer:
    """A policy's view of the n rows that one layer holds.

    Rows are in no particular order; ``seq`` gives the order of the stream. All heads hold the same number of tokens, but not
    always the same tokens. Arrays are ``[kv_heads, n]`` unless stated otherwise, and are read-only views of the memory where
    possible.

    ``index``: the layer's number, from 0. ``target``: how many of its ``free`` rows each head must keep. ``cache``: the cache
    of all layers.
    """

    def __init__(self, cache: KVCache, index: int, target: int = 0, shared: Compression | None = None) -> None:
        self.cache, self.index, self.target, self._shared = cache, index, target, shared or Compression()
        self._kept: Bool | None = None
        self._added: NewRows | None = None
        self._merged: dict[str, NDArray] | None = None  # the stored keys and values after a merge

    def __repr__(self) -> str:
        return f"Layer({self.index}, {self.seq.shape[1]} rows in each of {self.cache.kv_heads} KV heads, {self.target} to keep)"

    @property
    def kind(self) -> NDArray[np.uint8]:
        """The :class:`~edgevlm.runtime.cache.Kind` of each row: 0 prefix, 1 vision, 2 summary, 3 text."""
        return self.cache.kind(self.index)

    @property
    def seq(self) -> Int64:
        """Each row's place in the stream: a unique number, larger for newer rows."""
        return self.cache.seq(self.index)

    @property
    def frame(self) -> NDArray[np.int32]:
        """The number of each row's frame, or -1 for text outside frames."""
        return self.cache.frame(self.index)

    @property
    def confirmed(self) -> NDArray[np.int32]:
        """The last frame in which each row's patch was unchanged."""
        return self.cache.confirmed(self.index)

    @property
    def row(self) -> NDArray[np.int16]:
        """The grid row of each token's patch in its frame."""
        return self.cache.row(self.index)

    @property
    def col(self) -> NDArray[np.int16]:
        """The grid column of each token's patch in its frame."""
        return self.cache.col(self.index)

    @cached_property
    def time(self) -> NDArray[np.float64]:
        """The stream time of each row's frame in seconds, or 0 for text outside frames."""
        times = self._shared.times
        if times is None or not len(times.frame):
            return np.zeros(self.frame.shape)
        return np.where(self.frame < 0, 0.0, np.interp(self.frame, times.frame, times.seconds))

    @cached_property
    def keys(self) -> Float32:
        """A copy of the keys without their rotary embedding, float32 ``[kv_heads, n, head_dim]``, made on first use."""
        return self._turned(self.cache.dequantize("key", self.index), -1)

    @cached_property
    def values(self) -> Float32:
        """A copy of the values, float32 ``[kv_heads, n, head_dim]``, made on first use."""
        return self.cache.dequantize("value", self.index)

    @property
    def value_norms(self) -> Float32:
        """The L2 norm of each value."""
        return self.cache.value_norms(self.index)

    @cached_property
    def fixed(self) -> Bool:
        """A mask of the rows that always stay: prefix, text, and frame 0 if all later frames attend to it."""
        kind = self.kind
        mask: Bool = (kind == Kind.PREFIX) | (kind == Kind.TEXT)
        return mask | ((kind == Kind.VISION) & (self.frame == 0)) if self._shared.first_frame else mask

    @cached_property
    def free(self) -> Bool:
        """A mask of the rows that are not ``fixed``, which the policy may evict. Each head has the same number of free rows."""
        return ~self.fixed

    @property
    def coming(self) -> int:
        """The number of rows about to be appended."""
        return self._shared.coming

    @property
    def prepared(self) -> Any:
        """The result of the policy's ``prepare``, the same object in all layers."""
        return self._shared.prepared

    def top(self, score: NDArray[Any], count: int, among: Bool | None = None) -> Bool:
        """Return a mask of each head's ``count`` best rows by ``score``, chosen from ``among`` (by default, ``free``).

        Newer rows win ties.
        """
        which = self.free if among is None else among
        return kernels.top_k(np.ascontiguousarray(score, np.float32), self.seq, which, count)

    def newest(self, count: int, among: Bool | None = None) -> Bool:
        """Return a mask of each head's ``count`` newest rows, chosen from ``among`` (by default, ``free``)."""
        seq = self.seq
        age = (seq - seq.max(initial=0)).astype(np.float32)  # seq decides if float32 rounds two ages to a tie
        return self.top(age, count, among)

    def attention_of(self, *asked: str | Queries | Float32, seq: Int64 | None = None) -> Float32:
        """Return the attention that each row receives, summed over the query rows and over the query heads of a KV head.

        ``asked``: texts from the policy's ``needs.guidance``, a :class:`~edgevlm.runtime.policies.attention.QueryWindow`, or
        rotated queries ``[heads, m, head_dim]``. ``seq``: the ``seq`` of each rotated query, ``[m]``. A text attends as if it
        were appended right after the stream. A query attends to rows whose ``seq`` is not above its own. Raises ValueError if
        ``needs`` lacks the text or the layer.
        """
        first, cache = asked[0], self.cache
        own: Any = (None, None)
        if isinstance(first, str):
            queries, seq, own = self._guided([str(text) for text in asked])
        elif isinstance(first, np.ndarray):
            if seq is None:
                raise ValueError("attention_of: query arrays require seq")
            queries = first
        else:
            queries, seq = first.at(self)
        scale = cache.key_scale(self.index)
        return kernels.attention_mass(queries, seq, cache.key(self.index), self.seq, own[0], own[1], scale)

    def _guided(self, asked: list[str]) -> tuple[Float32, Int64, tuple[Float32, Int64]]:
        texts, guide = self._shared.texts, self._shared.guide
        if unknown := [text for text in asked if text not in texts]:
            raise ValueError(f"attention_of: text {unknown[0]!r} is not in needs.guidance; add it")
        assert guide is not None
        found = guide()
        if self.index not in found.queries:
            raise ValueError(f"attention_of: layer {self.index} is not in needs.guidance_layers; add it")
        ends = np.cumsum(found.rows)
        rows = np.concatenate([np.arange(ends[at] - found.rows[at], ends[at]) for at in map(texts.index, asked)])
        first, last = int(self.seq.max(initial=-1)) + 1, int(rows.max()) + 1
        return (
            np.ascontiguousarray(found.queries[self.index][:, rows]), first + rows,
            (np.ascontiguousarray(found.keys[self.index][:, :last]), first + np.arange(last)),
        )  # fmt: skip

    def keep(self, rows: Bool) -> None:
        """Keep these rows and the ``fixed`` rows, and evict the rest. Each head must keep exactly ``target`` ``free`` rows."""
        self._kept = rows

    def merge(self, gone: Bool, into: NDArray[np.integer], weight: NDArray[np.floating] | float = 1.0) -> None:
        """Merge some rows into rows that stay, and keep all other rows.

        ``gone``: a mask of the rows to merge, ``[kv_heads, n]``. ``into``: ``[kv_heads, n]``, the index, in the same head, of
        the row that each row is merged into. ``weight``: ``[kv_heads, n]``, the number of tokens that each row represents. The
        key and value of the row that stays become the weighted means of the merged rows; its other data is unchanged. Keys are
        averaged un-rotated, then rotated to that row's position. Raises ValueError if ``into`` points to a row that is fixed or
        in ``gone``, or if the weights of merged rows add up to 0 or less.
        """
        weights, keys, values = (
            np.broadcast_to(np.asarray(weight, np.float32), gone.shape),
            self.keys.copy(),
            self.values.copy(),
        )
        changed = np.zeros(gone.shape, np.bool_)
        for head, leaving in enumerate(gone):
            rows = np.flatnonzero(leaving)
            places, which = np.unique(into[head, rows], return_inverse=True)
            if len(places) and (places[0] < 0 or places[-1] >= gone.shape[1] or (leaving | self.fixed[head])[places].any()):
                raise ValueError(
                    f"merge: in layer {self.index}, KV head {head}, `into` refers to a row that is evicted or fixed"
                )
            changed[head, places] = True
            total = weights[head, places] + np.bincount(which, weights[head, rows], len(places)).astype(np.float32)
            if not (total > 0).all():
                raise ValueError(f"merge: in layer {self.index}, KV head {head}, the sum of weights must be above 0")
            for part in (keys[head], values[head]):
                mean = weights[head, places, None] * part[places]
                np.add.at(mean, which, weights[head, rows, None] * part[rows])
                part[places] = mean / total[:, None]
        parts = {"key": self._turned(keys, 1), "value": values}
        self._merged = {name: self._stored(name, part, changed) for name, part in parts.items()}
        self.keep(~gone)

    def add(self, new: NewRows) -> None:
        """Append rows that represent evicted rows. Each added row counts towards ``target``."""
        self._added = new

    def _turned(self, keys: Float32, sign: int) -> Float32:
        cache = self.cache
        position = cache.position(self.index)
        known, place = np.unique(position, return_inverse=True)
        angles = known[:, None] * cache.frequencies(self.index)
        cos, sin = np.cos(angles).astype(np.float32), (sign * np.sin(angles)).astype(np.float32)
        place = place.reshape(position.shape)
        if cache.axes == 1 or cache.pair_axis is None:
            at: Any = place[..., 0]
        else:
            at = (place[..., cache.pair_axis], np.arange(cache.head_dim // 2))
        low, high = np.split(keys, 2, -1)
        cos, sin = cos[at], sin[at]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def _stored(self, part: str, rows: Float32, changed: Bool) -> NDArray:
        cache = self.cache
        key = part == "key"
        stored = np.array(cache.key(self.index) if key else cache.value(self.index))
        scale = cache.key_scale(self.index) if key else cache.value_scale(self.index)
        new = rows.astype(cache.dtype) if scale is None else codes(rows, scale)
        stored[changed] = new[changed]
        return stored


def layers_of(cache: KVCache, shared: Compression | None = None) -> list[Layer]:
    """Return one view per layer of a cache."""
    return [Layer(cache, index, shared=shared) for index in range(cache.layers)]


def normalized(x: Float32) -> Float32:
    """Scale the vectors in the last axis of ``x`` to length 1. Vectors of zeros stay zero."""
    scaled: Float32 = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-30))
    return scaled
