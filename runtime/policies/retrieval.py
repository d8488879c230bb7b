"""The base of retrieval policies: a window on the device, older rows in blocks of a store, and a choice of blocks per layer.

The budget |M| is split into three parts, which together take the bytes that an eviction policy takes with the same budget: a
window of the newest tokens, which is always attended to; a working set that blocks are fetched into; and the index, in bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.cache import row_bytes as metadata_bytes
from edgevlm.runtime.policies.base import Appended, Bool, Float32, Needs, Plan, Policy, StreamShape, setting
from edgevlm.runtime.policies.baselines import SlidingWindow
from edgevlm.runtime.policies.layer import Layer
from edgevlm.runtime.retrieval.working_set import Phase, WorkingSet
from edgevlm.runtime.stateful import State, add_prefix, strip_prefix
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Chosen = Sequence[Sequence[int]]
"""Blocks for each KV head, best first."""


@dataclass
class Retrieval(Policy, ABC):
    """A policy over a store. Subclasses define how rows that leave the window become blocks, and which blocks a query needs.

    Subclasses add their index to ``state_fields``; it is made in :meth:`open`. A session finds these policies by their type.
    """

    window: float = setting(0.5, "fraction of |M| for the newest tokens, always attended to", above=0, below=1)
    index: float = setting(
        0.125, "fraction of |M|, in fp32 bytes, for the index; the rest is the working set", above=0, below=1
    )

    arena_policy: ClassVar[type[Policy]] = SlidingWindow  # decides which rows leave the window
    state_fields: ClassVar[tuple[str, ...]] = ("offloaded", "arena", "working")
    _scratch_fields: ClassVar[tuple[str, ...]] = ("_tables",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window + self.index >= 1:
            raise ValueError("window and index must leave something of 1 for the working set")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        frame = shape.tokens_per_frame
        self._index_rows = int(self.index * budget)
        self.window_rows = max(1, int(self.window * budget) // frame) * frame
        self.working_rows = max(0, budget - self._index_rows - self.window_rows)
        self.arena = self.arena_policy()
        self.arena.attach(self.window_rows, shape)

    def open(self, cache: KVCache, store: Store) -> None:
        """Set the cache, and the store that rows move to and are fetched from, before the first row."""
        self.cache, self.store = cache, store
        self.working = WorkingSet(cache, store, self.working_rows, self.shape.prefix)
        self.merges = self.lost = 0  # clusters that joined another because no slot was free; blocks that the store lost
        self.offloaded = np.zeros((cache.layers, cache.kv_heads), np.int64)  # rows that have left the device
        self._tables = np.zeros((2, 0, 0), np.float32)  # cosines and sines of the current call
        self.index_bytes = self._index_rows * cache.layers * row_bytes(cache)  # the most that the index may take

    @property
    def needs(self) -> Needs:
        return replace(self.arena.needs, variant="per-layer", working_rows=self.working_rows)

    @property
    def layer_budgets(self) -> Int64:
        """The window's budget in each layer."""
        return self.arena.layer_budgets

    @property
    def max_append(self) -> int:
        return self.arena.max_append

    def before_append(self, cache: KVCache, rows: int, *others: Any) -> Plan | None:
        """First offload the rows that leave the window to the store."""
        plan = self.arena.before_append(cache, rows, *others)
        for layer, keep in enumerate(plan.keep if plan else []):
            kind = cache.kind(layer)
            if keep is not None and (leaving := ~keep & ((kind == Kind.VISION) | (kind == Kind.TEXT))).any():
                self.offloaded[layer] += leaving.sum(1)
                self.offload(cache, layer, leaving)
        if plan is not None:
            self.working.forget()
        return plan

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        self.arena.after_append(layers, appended)

    def compacted(self) -> None:
        """Handle new positions; the session calls it after re-indexing."""
        self.working.contiguous = True
        self.working.forget()

    @abstractmethod
    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        """Put rows of a layer into the store: ``leaving`` ``[kv_heads, n_l]``, the same number in each head."""

    def begin(self, cos: Float32, sin: Float32) -> None:
        """Begin a call, with the rotary tables ``[S, head_dim / 2]`` of its rows' queries."""
        self._tables = np.stack([cos, sin])

    def unrotated(self, query: Float32) -> Float32:
        """Undo the rotary embedding of the current call's queries ``[heads, S, head_dim]``."""
        (cos, sin), (low, high) = self._tables, np.split(query, 2, -1)
        return np.concatenate([low * cos + high * sin, high * cos - low * sin], -1)

    def always(self, layer: int) -> Sequence[Block]:
        """Return rows of the working set that every call attends to, one block per KV head; called each time the set is
        filled.
        """
        return []

    @abstractmethod
    def choose(self, layer: int, query: Float32, phase: Phase) -> Chosen:
        """Return the blocks that a call attends to in addition to the window.

        query: rotated, ``[heads, S, head_dim]``, of all its rows.
        """

    def look_ahead(self, layer: int, query: Float32, phase: Phase) -> None:
        """Prefetch for ``layer`` by the query of the layer before it, while that layer computes."""

    def attend(self, layer: int, query: Float32, phase: Phase) -> Int32:
        """Choose and fetch blocks; return how many rows of the working set each KV head attends to, ``[kv_heads]``."""
        counts = self.working.load(layer, self.choose(layer, query, phase), self.always)
        if layer + 1 < self.shape.layers:
            self.look_ahead(layer + 1, query, phase)
        return counts

    @property
    def merged(self) -> int:
        """The number of index entries that joined another because the index was full."""
        return self.merges

    @abstractmethod
    def forget_lost(self) -> None:
        """Remove from the index the blocks that the store has lost."""

    def state(self) -> State:
        """Return the fields and the store's state."""
        self.forget_lost()
        lost, store = self.store.stats.lost, self.store.state()
        if self.store.stats.lost != lost:  # waiting blocks were written over them; now none waits
            self.forget_lost()
            store = self.store.state()
        return {**super().state(), **add_prefix("store", store)}

    def restore(self, state: State) -> None:
        """Restore the fields. Blocks lost since then leave the index when the loss is found."""
        store = strip_prefix("store", state)
        self.store.restore(store)
        super().restore({name: array for name, array in state.items() if name.removeprefix("store.") not in store})

    def no_room(self, entries: str) -> UserError:
        return UserError(
            f"policy {self.name}: a budget of {self.budget} tokens leaves {self.index_bytes} bytes for the index, less than "
            f"{entries}; give a larger --budget, or index="
        )


@dataclass
class QuestionRetrieval(Retrieval):
    """Retrieves for questions only; an answer's rows use its question's choice, and frames see the window.

    Subclasses store rows once they have left every layer, and rank blocks for a question.
    """

    state_fields: ClassVar[tuple[str, ...]] = (*Retrieval.state_fields, "lost")

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._leaving: list[Block] = []  # blocks of one compression, layer by layer
        self._chosen: dict[int, Chosen] = {}  # by layer, for the question that is being answered

    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        self._leaving.append(block_of(cache, layer, by_seq(cache, layer, leaving)))
        if layer == cache.layers - 1:
            leaving_blocks, self._leaving = self._leaving, []
            self.take_in(leaving_blocks)
            self.forget_lost()

    @abstractmethod
    def take_in(self, blocks: Sequence[Block]) -> None:
        """Put rows that have left every layer into index and store: one block per layer, rows in the order of the stream."""

    def choose(self, layer: int, query: Float32, phase: Phase) -> Chosen:
        nothing: Chosen = [()] * self.cache.kv_heads
        if phase == "question":
            self._chosen[layer] = self.rank(layer, self.unrotated(query)) if self.offloaded[layer].any() else nothing
        return nothing if phase == "prefill" else self._chosen.get(layer, nothing)

    @abstractmethod
    def rank(self, layer: int, query: Float32) -> Chosen:
        """Return the blocks for a question's un-rotated rows ``[heads, S, head_dim]``."""


def row_bytes(cache: KVCache) -> int:
    """Return the bytes of a layer's row in all KV heads, with its metadata, always counted as fp32, so that an index has the
    same size in any cache.
    """
    return cache.kv_heads * (2 * cache.head_dim * np.dtype(np.float32).itemsize + metadata_bytes(cache.axes))


def block_of(cache: KVCache, layer: int, rows: Int64) -> Block:
    """Copy rows ``[kv_heads, m]`` of a layer, chosen per head, to a block of all its heads."""
    parts = [np.asarray(getattr(cache, name)(layer)) for name in Block.__slots__]
    return Block(*[np.take_along_axis(part, rows if part.ndim == 2 else rows[..., None], 1) for part in parts])


def by_seq(cache: KVCache, layer: int, among: Bool) -> Int64:
    """Return the rows of a mask ``[kv_heads, n_l]``, the same number in each head, in the order of the stream: ``[kv_heads,
    m]``.
    """
    rows = np.nonzero(among)[1].reshape(cache.kv_heads, -1)
    return np.take_along_axis(rows, np.argsort(np.take_along_axis(cache.seq(layer), rows, 1), 1), 1)
