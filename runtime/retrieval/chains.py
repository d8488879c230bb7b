"""What each cluster has in the store: a few runs of pages, so that clusters merge and grow without ever being held whole."""

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

LINKS = 4
PAGE = 64  # rows of a block at most
GAPS = 8  # a run is trimmed when more than this part of it is missing: a fetch may then find so much less than it asks for


@dataclass(slots=True)
class Link:
    """Some rows of a cluster, PAGE to a block and the last block what is left: numbers ``first``, ``first + 1``, ...

    missing: of ``rows``, those of blocks that are lost. block: the rows themselves, as long as the store has none of them.
    """

    rows: int
    first: int = -1
    missing: int = 0
    block: Block | None = None

    @property
    def pages(self) -> range:
        return range(self.first, self.first + -(-self.rows // PAGE))

    @property
    def held(self) -> int:
        return self.rows - self.missing


class Chains(Stateful):
    """Up to LINKS runs of each slot of each layer and KV head.

    Where there would be more, the two that are most alike in size become one, so that sizes stay far apart and a row is
    rewritten a few times in its life: until its page is full, however large its cluster gets. A fetch that has room for a part
    of a run reads no more pages than that takes, evenly spread: rows of a cluster are alike, so a part stands for all its time.
    """

    state_fields = ("first", "rows", "missing")

    def __init__(self, layers: int, kv_heads: int, slots: int) -> None:
        self.first = np.full((layers, kv_heads, slots, LINKS), -1, np.int64)
        self.rows, self.missing = (np.zeros(self.first.shape, np.int32) for _ in range(2))

    @staticmethod
    def slot_bytes() -> int:
        return LINKS * (8 + 4 + 4)

    @property
    def held(self) -> Int32:
        """Rows of each cluster that are not lost, ``[layers, kv_heads, slots]``."""
        held: Int32 = (self.rows - self.missing).sum(3, dtype=np.int32)
        return held

    def of(self, layer: int, head: int, slots: Int64, room: int) -> tuple[list[int], int]:
        """Blocks of these slots, in this order, smallest run first in each, to cover ``room`` rows; and the rows left out."""
        blocks, left = [], 0
        for slot in slots.tolist():
            for link in self._links(layer, head, slot):
                if room <= 0:
                    left += link.held
                    continue
                full = link.rows // PAGE
                wanted = -(-room * link.rows // (link.held * PAGE))  # so many more as are missing
                if wanted < full:
                    blocks += [link.pages[(2 * at + 1) * full // (2 * wanted)] for at in range(wanted)]
                    left += link.held - wanted * PAGE * link.held // link.rows
                else:
                    blocks += link.pages
                room -= link.held
        return blocks, left

    def follow(self, store: Store, layer: int, head: int, home: Int32, parts: Mapping[int, Block]) -> dict[int, int]:
        """Bring ``store`` to what has become of the clusters of a KV head.

        home: where the sealed cluster of each slot is now, ``[slots]``, -1 where there was none; parts: rows newly sealed, by
        the slot where they are now. Returns, by slot, the rows that turned out to be lost.
        """
        old = np.flatnonzero(home >= 0)
        gone = old[home[old] != old]
        links = {slot: [Link(len(part), block=part)] for slot, part in parts.items()}
        links |= {slot: [] for slot in home[gone].tolist() if slot not in links}
        for slot in old[np.isin(home[old], list(links))].tolist():
            links[int(home[slot])] += self._links(layer, head, slot)
        self._write(layer, head, {slot: [] for slot in gone.tolist()})
        lost = {slot: shortened(store, of_slot) for slot, of_slot in links.items()}
        self._write(layer, head, links)
        return {slot: rows for slot, rows in lost.items() if rows}

    def forget(self, numbers: Sequence[int]) -> Int32:
        """These blocks are lost; returns how many rows each cluster had in them, ``[layers, kv_heads, slots]``."""
        before, told = self.held, np.array(numbers, np.int64)
        runs = np.flatnonzero(self.rows)
        runs = runs[np.argsort(self.first.flat[runs])]
        of = runs[np.maximum(np.searchsorted(self.first.flat[runs], told, "right") - 1, 0)] if len(runs) else runs
        page = told[: len(of)] - self.first.flat[of]
        rows = np.minimum(PAGE, self.rows.flat[of] - PAGE * page)
        there = (page >= 0) & (rows > 0)
        np.add.at(self.missing.reshape(-1), of[there], rows[there])
        empty = (self.missing == self.rows) & (self.rows > 0)
        self.rows[empty], self.missing[empty], self.first[empty] = 0, 0, -1
        lost: Int32 = before - self.held
        return lost

    def trim(self, store: Store) -> Int32:
        """Runs of which much is missing get numbers without gaps; returns rows found lost on the way, as :meth:`forget`."""
        before = self.held
        for at in zip(*np.nonzero(GAPS * self.missing > self.rows), strict=True):
            link = Link(int(self.rows[at]), int(self.first[at]), int(self.missing[at]))
            full, tail = link.rows // PAGE, link.rows % PAGE
            pages, last = store.renumber(link.pages[:full]), store.renumber(link.pages[full:])
            rows = PAGE * len(pages) + tail * len(last)
            self.first[at], self.rows[at], self.missing[at] = (pages or last).start if rows else -1, rows, 0
        lost: Int32 = before - self.held
        return lost

    def _links(self, layer: int, head: int, slot: int) -> list[Link]:
        of = zip(*(array[layer, head, slot].tolist() for array in (self.rows, self.first, self.missing)), strict=True)
        return [Link(rows, first, missing) for rows, first, missing in of if rows]

    def _write(self, layer: int, head: int, links: Mapping[int, list[Link]]) -> None:
        for slot, of_slot in links.items():
            of_slot.sort(key=lambda link: link.rows)
            for array in (self.rows, self.missing):
                array[layer, head, slot] = 0
            self.first[layer, head, slot] = -1
            for at, link in enumerate(of_slot):
                where = layer, head, slot, at
                self.first[where], self.rows[where], self.missing[where] = link.first, link.rows, link.missing


def shortened(store: Store, links: list[Link]) -> int:
    """Join those of like sizes until there are few enough, and put what is left to put; returns rows found lost on the way."""
    lost = 0
    while len(links) > LINKS:
        links.sort(key=lambda link: link.rows)
        small, large = min(pairwise(links), key=lambda pair: pair[1].rows / pair[0].rows)  # of equals the smallest
        if small.block is None and large.block is not None:
            small, large = large, small  # the one that is not in the store yet joins the other
        links.remove(small)
        lost += _join(store, small, large)
        if not large.rows:
            links.remove(large)
    for link in links:
        if link.block is not None:
            link.first = _put(store, [link.block])[0]
            link.block = None
    return lost


def _join(store: Store, small: Link, large: Link) -> int:
    """``large`` gets the rows of ``small`` behind its own; returns rows found lost on the way.

    Full pages stay as they are and get numbers that follow one another; what is read and put anew is less than a page of each.
    """
    before, tail = small.held + large.held, large.rows % PAGE
    if large.block is None and 0 < tail <= PAGE - small.rows:
        of_small = _rest(store, small)
        if not of_small or store.append(large.pages[-1], of_small[0]):
            large.rows += sum(map(len, of_small))
            return before - large.held
        small = Link(len(of_small[0]), block=of_small[0])
    full = [number for link in (large, small) for number in link.pages[: link.rows // PAGE] if link.block is None]
    rest = [block for link in (large, small) for block in _rest(store, link)]
    pages = store.renumber(full)
    first, rows = _put(store, rest)
    large.first, large.rows = (pages.start if pages else first), PAGE * len(pages) + rows
    large.missing, large.block = 0, None
    return before - large.rows


def _rest(store: Store, link: Link) -> list[Block]:
    """What fills no page of a link, or all that is not in the store yet; the store has it no more then."""
    if link.block is not None:
        return [link.block]
    pages = link.pages[link.rows // PAGE :]
    found = store.get(pages)
    store.drop(pages)
    return [block for block in found if block is not None]


def _put(store: Store, blocks: Iterable[Block]) -> tuple[int, int]:
    """Put rows page by page, under numbers that follow one another; the first of them, -1 for none, and how many rows."""
    numbers, rows, rest = [], 0, None
    for block in blocks:
        rest = joined([rest, block]) if rest else block
        full = len(rest) // PAGE * PAGE
        numbers += [store.put(rest[at : at + PAGE]) for at in range(0, full, PAGE)]
        rows, rest = rows + full, rest[full : len(rest)]
    if rest:
        numbers, rows = [*numbers, store.put(rest)], rows + len(rest)
    return numbers[0] if numbers else -1, rows
