"""The interface of every backend. A backend computes vision features and token embeddings, and its decoder appends to the
caller's KV buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.plugins import blamed, load_class

DEFAULT_ENGINE = "onnxruntime-cpu"

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
KVDevice = Literal["host", "cuda"]


@dataclass(frozen=True, slots=True)
class KVBuffer:
    """One layer's memory for keys and values, owned by the caller. At each address is a dense array ``[1, kv_heads, capacity,
    head_dim]``. ``owner``: keeps the memory alive while an engine uses it. ``key_scale``, ``value_scale``: for int8, what to
    multiply each channel's numbers by, float32 ``[kv_heads, head_dim]``.
    """

    key_address: int
    value_address: int
    shape: tuple[int, int, int, int]
    dtype: np.dtype
    owner: object = field(repr=False)
    key_scale: Float32 | None = field(default=None, repr=False)
    value_scale: Float32 | None = field(default=None, repr=False)


def arrays_of(buffer: KVBuffer) -> tuple[np.ndarray, np.ndarray]:
    """Return a buffer's keys and values as arrays ``[kv_heads, capacity, head_dim]`` that share its memory."""
    kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}[buffer.dtype.itemsize]
    block = kind * int(np.prod(buffer.shape))
    key, value = (
        np.ctypeslib.as_array(block.from_address(address)).view(buffer.dtype).reshape(buffer.shape[1:])
        for address in (buffer.key_address, buffer.value_address)
    )
    return key, value


@dataclass(frozen=True, slots=True)
class FramePattern:
    """The rows of the cache that new frames attend to in a layer with sparse attention.

    A call given a pattern appends whole frames only. A row sees the first ``shared`` rows of the cache. In its own frame, a row
    sees the rows up to itself. In the previous frame, a row sees only the row of the same patch. ``previous``: for each layer,
    KV head and patch, the index of the patch's row from the frame before the call, or -1 if that row is absent.
    """

    shared: int
    previous: Int64  # [layers, kv_heads, p]


@dataclass(frozen=True, slots=True)
class Sight:
    """Which rows each new row sees, for a decoder whose layers are not all causal.

    ``until``: how many of the call's rows each row sees, int32 ``[S]``. ``place``: the new rows' positions, int32 ``[S]``.
    ``held``: the positions of the rows already in each layer, int32 ``[kv_heads, n]``. In a layer with a window of w positions,
    a row sees the rows that are fewer than w positions back.
    """

    until: Int32
    place: Int32
    held: Sequence[Int32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a decoder step. ``logits``: float32 ``[requested rows, vocabulary]``. ``probes``: each probed layer's
    rotated queries, float32 ``[heads, S, head_dim]``.
    """

    logits: Float32
    probes: dict[int, Float32]


Fetch = Callable[[int, Float32], Int32]
"""A function called with a layer and its rotated queries ``[heads, S, head_dim]`` before the layer attends. It puts rows after
the valid ones in the layer's buffer, and returns how many rows each KV head attends to, ``[kv_heads]``."""


class Decoder(Protocol):
    """Runs the language model on one stream's KV buffers."""

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
        rows: Sequence[Sequence[Int32]] | None = None,
        fetch: Fetch | None = None,
        sight: Sight | None = None,
    ) -> StepResult:
        """Append S rows to the buffers in place and return the requested logits.

        ``embeds``: the rows to append, ``[S, hidden]``, or ``[S, row_width]`` from a tower. ``cos``, ``sin``: the rotary tables
        of the new rows, ``[S, rotary]``. ``past_len``: the number of valid rows in each layer before the step, ``[layers]``.
        After the step, rows ``[past_len[l], past_len[l] + S)`` of layer ``l`` hold the new keys (rotated) and values; the
        caller commits them. ``logit_rows``: for which of the S rows to return logits; a negative index counts from the end, and
        ``()`` requests none. ``pattern``: only for a decoder that was bound with ``sparse``.

        ``rows``: only for a ``by_layer`` engine; lists the valid rows that the new rows see, by layer and KV head, int32
        without duplicates. ``fetch``: adds fetched rows, which come before the new rows. ``sight``: required if the decoder is
        not causal. Raises CacheFull or CacheError before the cache is changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class TowerBuffer:
    """The memory of a tower's cache for one stream, owned by the caller.

    ``size``: in bytes. ``owner``: keeps the memory alive while an engine uses it. The bytes may be copied and restored at
    another address.
    """

    address: int
    size: int
    owner: object = field(repr=False)

    @classmethod
    def of(cls, memory: NDArray[np.uint8]) -> TowerBuffer:
        """Return a buffer for an array. ``memory``: dense, of ``VisionSpec.changed.cache_bytes`` bytes."""
        return cls(memory.ctypes.data, memory.nbytes, memory)


class ChangedTower(Protocol):
    """Encodes only the changed patches of one stream's frames."""

    def encode(self, pixels: Float32, patches: Int32) -> tuple[Float32, Int32]:
        """Encode some patches of a frame, and return the features and numbers of the tokens that contain them.

        ``pixels``: a whole normalised frame ``[3, H, W]``, or ``[group, 3, H, W]`` for towers that merge frames. ``patches``:
        patch numbers, row-major in ``VisionSpec.changed.grid``, sorted and unique. Other patches keep their keys and values.
        Features are ``[t, row_width]``. Token numbers, ``[t]``, count row by row in ``VisionSpec.grid`` and are sorted.

        The first call on an empty cache must encode all patches. A call with all patches returns the same features as
        :meth:`Engine.encode`, at the same cost. Raises ValueError for wrong shapes, before the cache is changed.
        """
        ...


class Engine(Protocol):
    """Runs one bundle's graphs. ``kv_device``: the device that must hold the cache's keys and values.

    ``by_layer``: whether the engine's decoders accept the arguments ``rows``, ``fetch`` and ``sight``.
    """

    kv_device: KVDevice
    by_layer: bool

    def encode(self, pixels: Float32) -> Float32:
        """Encode frames to the decoder's input rows.

        ``pixels``: normalised frames, ``[F, 3, H, W]``. The result is ``[G, tokens_per_frame, row_width]``. G is the number of
        groups if the tower merges frames, otherwise F. The last frame is repeated to fill its group. Frames must be of size
        ``VisionSpec.size`` or, if ``VisionSpec.pixels`` is set, of any size that ``VisionSpec.pixels`` allows.
        """
        ...

    def capacity(self, rows: int) -> int:
        """Return how many rows each layer's buffer must have: ``rows``, or a fixed number if the backend's graphs need a fixed
        number. Raises UserError if the graphs cannot hold ``rows`` rows.
        """
        ...

    def embed(self, token_ids: Int64) -> Float32:
        """Return the embeddings of token ids, ``[N, hidden]``."""
        ...

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> Decoder:
        """Return a decoder that appends to these buffers, one per layer.

        ``probes``: the layers whose queries each step returns. ``sparse``: whether steps may pass a ``pattern``. Raises
        UserError if the bundle lacks a required graph.
        """
        ...

    def bind_tower(self, buffer: TowerBuffer) -> ChangedTower:
        """Return a tower that encodes one stream's changed patches and uses this memory.

        Raises UserError if the bundle lacks the tower's graph or the backend cannot run it.
        """
        ...

    def release_memory(self, short: bool) -> None:
        """Set whether to free the working memory after each call. ``short``: whether the system is short of memory."""
        ...

    def close(self) -> None: ...


def load_engine(name: str, bundle: Bundle, **options: Any) -> Engine:
    """Load a bundle on a backend. ``name``: an entry point of ``edgevlm.engines``, or ``./file.py:Class``.

    ``options``: the backend's settings, such as ``threads`` for the CPU. Raises UserError for an unknown name, a package that
    is not installed, and a bundle that the backend refuses.
    """
    made = load_class("engines", name)
    with blamed(f"engine {name}", made):
        engine: Engine = made(bundle, **options)
    if not (bundle.decoder.is_causal or engine.by_layer):
        engine.close()
        raise UserError(f"{bundle.path}: window or whole-frame attention requires --engine onnxruntime-cpu")
    return engine
