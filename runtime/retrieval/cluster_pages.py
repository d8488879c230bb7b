"""Store each cluster as a few runs of pages, so that clusters can merge and grow without being read completely."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.stateful import Stateful
from edgevlm.runtime.store import Block, Store, joined

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MAX_RUNS = 4
PAGE_ROWS = 64  # the largest number of rows in a block


@dataclass(slots=True)
class PageRun:
    """Some of a cluster's rows, in consecutive blocks of PAGE_ROWS rows.

    ``first``: the first block's number. ``missing``: the number of rows in lost blocks. ``block``: the rows themselves, until
    they are written to the store.
    """

    rows: int
    first: int = -1
    missing: int = 0
    block: Block | None = None

    @property
    def pages(self) -> range:
        return range(self.first, self.first + -(-self.rows // PAGE_ROWS))

    @property
    def held(self) -> int:
        return self.rows - self.missing


class ClusterPages(Stateful):
    """A table of each cluster's runs of blocks. Each slot of each layer and KV head has up to MAX_RUNS runs.

    If a slot gets more than MAX_RUNS runs, the two runs closest in size are joined, so rows are seldom rewritten. If a fetch
    has room for only part of a run, it reads only some of the run's pages, evenly spread.
    """

    state_fields = ("first", "rows", "missing")

    def __init__(self, layers: int, kv_heads: int, slots: int) -> None:
        self.first = np.full((layers, kv_heads, slots, MAX_RUNS), -1, np.int64)
        self.rows, self.missing = (np.zeros(self.first.shape, np.int32) for _ in range(2))

    @staticmethod
    def slot_bytes() -> int:
        return MAX_RUNS * (8 + 4 + 4)

    def held(self, layer: int) -> Int32:
        """Return how many rows of each cluster the store still has, ``[kv_heads, slots]``."""
        held: Int32 = (self.rows[layer] - self.missing[layer]).sum(2, dtype=np.int32)
        return held

    def blocks_of(self, layer: int, head: int, slots: Int64, rows: int) -> tuple[list[int], int]:
        """Return the blocks to fetch for about ``rows`` rows of some clusters, and the number of rows left out.

        Clusters are fetched in the order of ``slots``, and each cluster's runs from the smallest to the largest.
        """
        blocks, left = [], 0
        for slot in slots.tolist():
            for run in self._runs(layer, head, slot):
                if rows <= 0:
                    left += run.held
                    continue
                full = run.rows // PAGE_ROWS
                wanted = -(-rows * run.rows // (run.held * PAGE_ROWS))  # counts more pages, to make up for missing rows
                if wanted < full:
                    blocks += [run.pages[(2 * at + 1) * full // (2 * wanted)] for at in range(wanted)]
                    left += run.held - wanted * PAGE_ROWS * run.held // run.rows
                else:
                    blocks += run.pages
                rows -= run.held
        return blocks, left

    def update(self, store: Store, layer: int, head: int, home: Int32, parts: Mapping[int, Block]) -> None:
        """Apply the changes of a KV head's clusters to the store.

        ``home``: the new slot of the sealed cluster that was in each slot, ``[slots]``, or -1 if the slot had no sealed
        cluster. ``parts``: the newly sealed rows of each slot.
        """
        old = np.flatnonzero(home >= 0)
        gone = old[home[old] != old]
        runs_of = {slot: [PageRun(len(part), block=part)] for slot, part in parts.items()}
        runs_of |= {slot: [] for slot in home[gone].tolist() if slot not in runs_of}
        for slot in old[np.isin(home[old], list(runs_of))].tolist():
            runs_of[int(home[slot])] += self._runs(layer, head, slot)
        for of_slot in runs_of.values():
            merge_runs(store, of_slot)
        self._write(layer, head, {slot: [] for slot in gone.tolist()} | runs_of)

    def block_ids(self, layer: int, head: int, slots: Iterable[int]) -> list[int]:
        """Return the numbers of all blocks that hold the given clusters."""
        return [number for slot in slots for run in self._runs(layer, head, int(slot)) for number in run.pages]

    def take_out(self, store: Store, layer: int, head: int, slots: Sequence[int]) -> list[Block]:
        """Remove all blocks of some clusters from the store, and return those that were not lost."""
        numbers = self.block_ids(layer, head, slots)
        found = store.get(numbers)
        store.drop(numbers)
        self._write(layer, head, {int(slot): [] for slot in slots})
        return [block for block in found if block is not None]

    def mark_lost(self, numbers: Sequence[int]) -> None:
        """Count the rows of lost blocks as missing."""
        runs = np.flatnonzero(self.rows)
        if not len(runs):
            return
        runs, lost = runs[np.argsort(self.first.flat[runs])], np.array(numbers, np.int64)
        of = runs[np.maximum(np.searchsorted(self.first.flat[runs], lost, "right") - 1, 0)]
        page = lost - self.first.flat[of]
        rows = np.minimum(PAGE_ROWS, self.rows.flat[of] - PAGE_ROWS * page)
        there = (page >= 0) & (rows > 0)
        np.add.at(self.missing.reshape(-1), of[there], rows[there])
        empty = self.missing == self.rows
        self.rows[empty], self.missing[empty], self.first[empty] = 0, 0, -1

    def _runs(self, layer: int, head: int, slot: int) -> list[PageRun]:
        of = zip(*(array[layer, head, slot].tolist() for array in (self.rows, self.first, self.missing)), strict=True)
        return [PageRun(rows, first, missing) for rows, first, missing in of if rows]

    def _write(self, layer: int, head: int, runs_of: Mapping[int, list[PageRun]]) -> None:
        for slot, of_slot in runs_of.items():
            for at, run in enumerate((sorted(of_slot, key=lambda run: run.rows) + [PageRun(0)] * MAX_RUNS)[:MAX_RUNS]):
                where = layer, head, slot, at
                self.first[where], self.rows[where], self.missing[where] = run.first, run.rows, run.missing


def merge_runs(store: Store, runs: list[PageRun]) -> None:
    """Join runs of similar size until there are at most MAX_RUNS, then store the runs that are still in memory."""
    while len(runs) > MAX_RUNS:
        runs.sort(key=lambda run: run.rows)
        small, large = min(pairwise(runs), key=lambda pair: pair[1].rows / pair[0].rows)  # the smallest pair wins ties
        if small.block is None and large.block is not None:
            small, large = large, small  # append the run that is not yet in the store to the stored run
        runs.remove(small)
        _join(store, small, large)
        if not large.rows:
            runs.remove(large)
    for run in runs:
        if run.block is not None:
            run.first, _ = _put(store, [run.block])
            run.block = None


def _join(store: Store, small: PageRun, large: PageRun) -> None:
    """Append the rows of the small run to the large run.

    Full pages get new, consecutive numbers. Only the last page of each run, if it is not full, is read and written again.
    """
    tail = large.rows % PAGE_ROWS
    if large.block is None and 0 < tail <= PAGE_ROWS - small.rows:
        of_small = _rest(store, small)
        if not of_small or store.append(large.pages[-1], of_small[0]):
            large.rows += sum(map(len, of_small))
            return
        small = PageRun(len(of_small[0]), block=of_small[0])
    full = [number for run in (large, small) for number in run.pages[: run.rows // PAGE_ROWS] if run.block is None]
    rest = [block for run in (large, small) for block in _rest(store, run)]
    pages = store.renumber(full)
    first, rows = _put(store, rest)
    large.first, large.rows = (pages.start if pages else first), PAGE_ROWS * len(pages) + rows
    large.missing, large.block = 0, None


def _rest(store: Store, run: PageRun) -> list[Block]:
    if run.block is not None:
        return [run.block]
    pages = run.pages[run.rows // PAGE_ROWS :]
    found = store.get(pages)
    store.drop(pages)
    return [block for block in found if block is not None]


def _put(store: Store, blocks: Sequence[Block]) -> tuple[int, int]:
    """Store rows in consecutive blocks of PAGE_ROWS. Return the number of the first block, or -1 if there are no rows, and the
    number of rows.
    """
    if not blocks:
        return -1, 0
    rows = joined(blocks)
    numbers = [store.put(rows[at : at + PAGE_ROWS]) for at in range(0, len(rows), PAGE_ROWS)]
    return numbers[0], len(rows)
