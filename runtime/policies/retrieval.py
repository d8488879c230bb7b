"""Define the base of retrieval policies, which keep a window of rows on the device and older rows as blocks of a store.

The budget |M| is divided among a window of the newest tokens, a working set for fetched blocks, and an index. With the same
budget, a retrieval policy takes as much memory as an eviction policy.
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
    """A policy with a store. Subclasses turn rows that leave the window into blocks, and choose which blocks a query fetches.

    Subclasses create their index in :meth:`open`, and add it to ``state_fields``.
    """

    window: float = setting(0.5, "fraction of |M| for the newest tokens, which every call attends to", above=0, below=1)
    index: float = setting(
        0.125, "fraction of |M|, in fp32 bytes, for the index; the rest is the working set", above=0, below=1
    )

    arena_policy: ClassVar[type[Policy]] = SlidingWindow  # decides which rows leave the window
    state_fields: ClassVar[tuple[str, ...]] = ("offloaded", "arena", "working")
    _scratch_fields: ClassVar[tuple[str, ...]] = ("_tables",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window + self.index >= 1:
            raise ValueError("window + index must be below 1, to leave room for the working set")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        frame = shape.tokens_per_frame
        self._index_rows = int(self.index * budget)
        self.window_rows = max(1, int(self.window * budget) // frame) * frame
        self.working_rows = max(0, budget - self._index_rows - self.window_rows)
        self.arena = self.arena_policy()
        self.arena.attach(self.window_rows, shape)

    def open(self, cache: KVCache, store: Store) -> None:
        """Set the cache and the store of the session. Called once, before the first append."""
        self.cache, self.store = cache, store
        self.working = WorkingSet(cache, store, self.working_rows, self.shape.prefix)
        self.merges = self.lost = 0  # merges: clusters merged because no slot was free. lost: blocks lost by the store
        self.offloaded = np.zeros((cache.layers, cache.kv_heads), np.int64)
        self._tables = np.zeros((2, 0, 0), np.float32)  # rotary cosines and sines of the current call
        self.index_bytes = self._index_rows * cache.layers * row_bytes(cache)

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
        """Move the rows that are leaving the window to the store, then return the window policy's plan."""
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
        """Called after a re-indexing has changed the rows' positions."""
        self.working.contiguous = True
        self.working.forget()

    @abstractmethod
    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        """Move rows of a layer to the store. ``leaving``: a mask of the rows to move, ``[kv_heads, n_l]``, with the same number
        of rows in each head.
        """

    def begin(self, cos: Float32, sin: Float32) -> None:
        """Set the rotary tables of the queries in a decoder call. ``cos``, ``sin``: ``[S, head_dim / 2]``."""
        self._tables = np.stack([cos, sin])

    def unrotated(self, query: Float32) -> Float32:
        """Undo the rotary embedding of the current call's queries. ``query``: ``[heads, S, head_dim]``."""
        (cos, sin), (low, high) = self._tables, np.split(query, 2, -1)
        return np.concatenate([low * cos + high * sin, high * cos - low * sin], -1)

    def always(self, layer: int) -> Sequence[Block]:
        """Return rows that every call attends to, besides the window and the chosen blocks, as one block per KV head."""
        return []

    @abstractmethod
    def choose(self, layer: int, query: Float32, phase: Phase) -> Chosen:
        """Return the blocks that a call attends to in addition to the window.

        ``query``: the rotated queries of all rows of the call, ``[heads, S, head_dim]``.
        """

    def look_ahead(self, layer: int, query: Float32, phase: Phase) -> None:
        """Prefetch the blocks that ``layer`` will probably choose. ``query``: the previous layer's queries, as in
        :meth:`choose`.
        """

    def attend(self, layer: int, query: Float32, phase: Phase) -> Int32:
        """Choose and fetch blocks, and return how many rows of the working set each KV head attends to, ``[kv_heads]``."""
        counts = self.working.load(layer, self.choose(layer, query, phase), self.always)
        if layer + 1 < self.shape.layers:
            self.look_ahead(layer + 1, query, phase)
        return counts

    @property
    def merged(self) -> int:
        """The number of index entries that were merged into another entry because the index was full."""
        return self.merges

    @abstractmethod
    def forget_lost(self) -> None:
        """Remove from the index the blocks that the store has lost."""

    def state(self) -> State:
        """Return the policy's state fields and the store's state."""
        self.forget_lost()
        lost, store = self.store.stats.lost, self.store.state()
        if self.store.stats.lost != lost:  # writing the store's waiting blocks has overwritten other blocks
            self.forget_lost()
            store = self.store.state()
        return {**super().state(), **add_prefix("store", store)}

    def restore(self, state: State) -> None:
        """Restore the policy's state fields and the store. Lost blocks leave the index at the next :meth:`forget_lost`."""
        store = strip_prefix("store", state)
        self.store.restore(store)
        super().restore({name: array for name, array in state.items() if name.removeprefix("store.") not in store})

    def no_room(self, entries: str) -> UserError:
        return UserError(
            f"policy {self.name}: a budget of {self.budget} tokens leaves {self.index_bytes} bytes for the index, too few for "
            f"{entries}; increase --budget or index="
        )


@dataclass
class QuestionRetrieval(Retrieval):
    """A policy that fetches blocks only for a question and its answer. New frames attend only to the window.

    Subclasses store rows that have left every layer, and rank blocks for a question.
    """

    state_fields: ClassVar[tuple[str, ...]] = (*Retrieval.state_fields, "lost")

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._leaving: list[Block] = []
        self._chosen: dict[int, Chosen] = {}  # the current question's blocks, by layer

    def offload(self, cache: KVCache, layer: int, leaving: Bool) -> None:
        self._leaving.append(block_of(cache, layer, by_seq(cache, layer, leaving)))
        if layer == cache.layers - 1:
            leaving_blocks, self._leaving = self._leaving, []
            self.take_in(leaving_blocks)
            self.forget_lost()

    @abstractmethod
    def take_in(self, blocks: Sequence[Block]) -> None:
        """Once rows have left every layer, add them to the index and the store. ``blocks``: one block per layer, with the
        rows in stream order.
        """

    def choose(self, layer: int, query: Float32, phase: Phase) -> Chosen:
        nothing: Chosen = [()] * self.cache.kv_heads
        if phase == "question":
            self._chosen[layer] = self.rank(layer, self.unrotated(query)) if self.offloaded[layer].any() else nothing
        return nothing if phase == "prefill" else self._chosen.get(layer, nothing)

    @abstractmethod
    def rank(self, layer: int, query: Float32) -> Chosen:
        """Return the blocks to fetch for a question. ``query``: un-rotated, ``[heads, S, head_dim]``."""


def row_bytes(cache: KVCache) -> int:
    """Return the size in bytes of one token in one layer, with its fp32 keys and values in all KV heads and its metadata."""
    return cache.kv_heads * (2 * cache.head_dim * np.dtype(np.float32).itemsize + metadata_bytes(cache.axes))


def block_of(cache: KVCache, layer: int, rows: Int64) -> Block:
    """Return a block with copies of a layer's rows. ``rows``: each head's indices, ``[kv_heads, m]``."""
    parts = [np.asarray(getattr(cache, name)(layer)) for name in Block.__slots__]
    return Block(*[np.take_along_axis(part, rows if part.ndim == 2 else rows[..., None], 1) for part in parts])


def by_seq(cache: KVCache, layer: int, among: Bool) -> Int64:
    """Return the indices of a mask's rows in stream order, ``[kv_heads, m]``. The mask must select m rows in each head."""
    rows = np.nonzero(among)[1].reshape(cache.kv_heads, -1)
    return np.take_along_axis(rows, np.argsort(np.take_along_axis(cache.seq(layer), rows, 1), 1), 1)
