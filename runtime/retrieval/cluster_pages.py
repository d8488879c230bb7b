"""Pages of clusters in the store: a few runs for each, so that clusters merge and grow without being read in full."""

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
PAGE_ROWS = 64  # rows of a block at most
MAX_GAPS = 8  # a run is compacted when more than this part of it is missing: a fetch finds so much less than it asks for


@dataclass(slots=True)
class PageRun:
    """Some rows of a cluster, PAGE_ROWS to a block, with numbers ``first``, ``first + 1``, ...

    missing: of ``rows``, those in lost blocks. block: the rows themselves, while none of them is in the store.
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
    """Up to MAX_RUNS runs of each slot of each layer and KV head.

    If there would be more, the two closest in size become one, so that a row is rewritten a few times at most: until its page
    is full. A fetch with room for a part of a run reads only that many pages, evenly spread.
    """

    state_fields = ("first", "rows", "missing")

    def __init__(self, layers: int, kv_heads: int, slots: int) -> None:
        self.first = np.full((layers, kv_heads, slots, MAX_RUNS), -1, np.int64)
        self.rows, self.missing = (np.zeros(self.first.shape, np.int32) for _ in range(2))

    @staticmethod
    def slot_bytes() -> int:
        return MAX_RUNS * (8 + 4 + 4)

    @property
    def held(self) -> Int32:
        """Rows of each cluster that are not lost, ``[layers, kv_heads, slots]``."""
        held: Int32 = (self.rows - self.missing).sum(3, dtype=np.int32)
        return held

    def blocks_of(self, layer: int, head: int, slots: Int64, rows: int) -> tuple[list[int], int]:
        """Blocks of these slots, in this order, smallest run first in each, to cover this many rows; and the rows left out."""
        blocks, left = [], 0
        for slot in slots.tolist():
            for run in self._runs(layer, head, slot):
                if rows <= 0:
                    left += run.held
                    continue
                full = run.rows // PAGE_ROWS
                wanted = -(-rows * run.rows // (run.held * PAGE_ROWS))  # so many more as are missing
                if wanted < full:
                    blocks += [run.pages[(2 * at + 1) * full // (2 * wanted)] for at in range(wanted)]
                    left += run.held - wanted * PAGE_ROWS * run.held // run.rows
                else:
                    blocks += run.pages
                rows -= run.held
        return blocks, left

    def update(self, store: Store, layer: int, head: int, home: Int32, parts: Mapping[int, Block]) -> dict[int, int]:
        """Update ``store`` after the clusters of a KV head have changed.

        home: the slot where the sealed cluster of each slot is now, ``[slots]``, -1 if there was none; parts: rows newly
        sealed, by slot. Returns, by slot, the rows found lost.
        """
        old = np.flatnonzero(home >= 0)
        gone = old[home[old] != old]
        runs_of = {slot: [PageRun(len(part), block=part)] for slot, part in parts.items()}
        runs_of |= {slot: [] for slot in home[gone].tolist() if slot not in runs_of}
        for slot in old[np.isin(home[old], list(runs_of))].tolist():
            runs_of[int(home[slot])] += self._runs(layer, head, slot)
        self._write(layer, head, {slot: [] for slot in gone.tolist()})
        lost = {slot: merge_runs(store, of_slot) for slot, of_slot in runs_of.items()}
        self._write(layer, head, runs_of)
        return {slot: rows for slot, rows in lost.items() if rows}

    def block_ids(self, layer: int, head: int, slots: Iterable[int]) -> list[int]:
        """All blocks of these slots."""
        return [number for slot in slots for run in self._runs(layer, head, int(slot)) for number in run.pages]

    def take_out(self, store: Store, layer: int, head: int, slots: Sequence[int]) -> list[Block]:
        """All rows of these slots; the store has them no more."""
        numbers = self.block_ids(layer, head, slots)
        found = store.get(numbers)
        store.drop(numbers)
        self._write(layer, head, {int(slot): [] for slot in slots})
        return [block for block in found if block is not None]

    def mark_lost(self, numbers: Sequence[int]) -> Int32:
        """These blocks are lost; returns how many rows each cluster had in them, ``[layers, kv_heads, slots]``."""
        before, told = self.held, np.array(numbers, np.int64)
        runs = np.flatnonzero(self.rows)
        runs = runs[np.argsort(self.first.flat[runs])]
        of = runs[np.maximum(np.searchsorted(self.first.flat[runs], told, "right") - 1, 0)] if len(runs) else runs
        page = told[: len(of)] - self.first.flat[of]
        rows = np.minimum(PAGE_ROWS, self.rows.flat[of] - PAGE_ROWS * page)
        there = (page >= 0) & (rows > 0)
        np.add.at(self.missing.reshape(-1), of[there], rows[there])
        empty = (self.missing == self.rows) & (self.rows > 0)
        self.rows[empty], self.missing[empty], self.first[empty] = 0, 0, -1
        lost: Int32 = before - self.held
        return lost

    def compact(self, store: Store) -> Int32:
        """Runs of which much is missing get numbers without gaps; returns rows found lost on the way, as :meth:`mark_lost`."""
        before = self.held
        for at in zip(*np.nonzero(MAX_GAPS * self.missing > self.rows), strict=True):
            run = PageRun(int(self.rows[at]), int(self.first[at]), int(self.missing[at]))
            full, tail = run.rows // PAGE_ROWS, run.rows % PAGE_ROWS
            pages, last = store.renumber(run.pages[:full]), store.renumber(run.pages[full:])
            rows = PAGE_ROWS * len(pages) + tail * len(last)
            self.first[at], self.rows[at], self.missing[at] = (pages or last).start if rows else -1, rows, 0
        lost: Int32 = before - self.held
        return lost

    def _runs(self, layer: int, head: int, slot: int) -> list[PageRun]:
        of = zip(*(array[layer, head, slot].tolist() for array in (self.rows, self.first, self.missing)), strict=True)
        return [PageRun(rows, first, missing) for rows, first, missing in of if rows]

    def _write(self, layer: int, head: int, runs_of: Mapping[int, list[PageRun]]) -> None:
        for slot, of_slot in runs_of.items():
            of_slot.sort(key=lambda run: run.rows)
            for array in (self.rows, self.missing):
                array[layer, head, slot] = 0
            self.first[layer, head, slot] = -1
            for at, run in enumerate(of_slot):
                where = layer, head, slot, at
                self.first[where], self.rows[where], self.missing[where] = run.first, run.rows, run.missing


def merge_runs(store: Store, runs: list[PageRun]) -> int:
    """Join those of like sizes until there are few enough, and put what is left to put; returns rows found lost on the way."""
    lost = 0
    while len(runs) > MAX_RUNS:
        runs.sort(key=lambda run: run.rows)
        small, large = min(pairwise(runs), key=lambda pair: pair[1].rows / pair[0].rows)  # of equals the smallest
        if small.block is None and large.block is not None:
            small, large = large, small  # the one that is not in the store yet joins the other
        runs.remove(small)
        lost += _join(store, small, large)
        if not large.rows:
            runs.remove(large)
    for run in runs:
        if run.block is not None:
            run.first = _put(store, [run.block])[0]
            run.block = None
    return lost


def _join(store: Store, small: PageRun, large: PageRun) -> int:
    """``large`` gets the rows of ``small`` behind its own; returns rows found lost on the way.

    Full pages stay as they are and get numbers that follow one another; what is read and put anew is less than a page of each.
    """
    before, tail = small.held + large.held, large.rows % PAGE_ROWS
    if large.block is None and 0 < tail <= PAGE_ROWS - small.rows:
        of_small = _rest(store, small)
        if not of_small or store.append(large.pages[-1], of_small[0]):
            large.rows += sum(map(len, of_small))
            return before - large.held
        small = PageRun(len(of_small[0]), block=of_small[0])
    full = [number for run in (large, small) for number in run.pages[: run.rows // PAGE_ROWS] if run.block is None]
    rest = [block for run in (large, small) for block in _rest(store, run)]
    pages = store.renumber(full)
    first, rows = _put(store, rest)
    large.first, large.rows = (pages.start if pages else first), PAGE_ROWS * len(pages) + rows
    large.missing, large.block = 0, None
    return before - large.rows


def _rest(store: Store, run: PageRun) -> list[Block]:
    """What fills no page of a run, or all that is not in the store yet; the store has it no more then."""
    if run.block is not None:
        return [run.block]
    pages = run.pages[run.rows // PAGE_ROWS :]
    found = store.get(pages)
    store.drop(pages)
    return [block for block in found if block is not None]


def _put(store: Store, blocks: Iterable[Block]) -> tuple[int, int]:
    """Put rows page by page, under numbers that follow one another; the first of them, -1 for none, and how many rows."""
    numbers, rows, rest = [], 0, None
    for block in blocks:
        rest = joined([rest, block]) if rest else block
        full = len(rest) // PAGE_ROWS * PAGE_ROWS
        numbers += [store.put(rest[at : at + PAGE_ROWS]) for at in range(0, full, PAGE_ROWS)]
        rows, rest = rows + full, rest[full:]
    if rest:
        numbers, rows = [*numbers, store.put(rest)], rows + len(rest)
    return numbers[0] if numbers else -1, rows
