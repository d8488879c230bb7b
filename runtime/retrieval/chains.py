"""The blocks of each cluster: a few, so that clusters merge without the store copying what is large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store import Block, Store

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

LINKS = 4


@dataclass(slots=True)
class Link:
    """Some rows of a cluster: in the store under ``number``, or, as long as it has none, ``block``."""

    rows: int
    number: int = -1
    block: Block | None = None


class Chains:
    """Up to LINKS blocks of each slot of each layer and KV head.

    Where there would be more, the two that are most alike in size become one, so that sizes stay far apart and a row is
    rewritten a few times in its life, however large its cluster gets. (With the two smallest, what is newly sealed would have a
    block of a quarter of the cluster rewritten again and again.) A fetch that has room for a part reads no more than that.
    """

    def __init__(self, layers: int, kv_heads: int, slots: int) -> None:
        self.number = np.full((layers, kv_heads, slots, LINKS), -1, np.int64)
        self.rows = np.zeros(self.number.shape, np.int32)

    @staticmethod
    def slot_bytes() -> int:
        return LINKS * (8 + 4)

    def state(self) -> dict[str, NDArray]:
        return {"number": self.number, "rows": self.rows}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Raises KeyError or ValueError for the state of other shapes."""
        if not state["number"].shape == state["rows"].shape == self.number.shape:
            raise ValueError(f"chains are {state['number'].shape} and not {self.number.shape}")
        self.number[:], self.rows[:] = state["number"], state["rows"]

    def of(self, layer: int, head: int, slots: Int64) -> tuple[Int64, Int32]:
        """The blocks of these slots, in this order, smallest first in each: their numbers and rows, ``[n]``."""
        rows = self.rows[layer, head, slots]
        there = rows > 0
        return self.number[layer, head, slots][there], rows[there]

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
            numbers, rows = self.number[layer, head, slot].tolist(), self.rows[layer, head, slot].tolist()
            links[int(home[slot])] += [Link(count, number) for number, count in zip(numbers, rows, strict=True) if count]
        self._write(layer, head, {slot: [] for slot in gone.tolist()})
        lost = {slot: shortened(store, of_slot) for slot, of_slot in links.items()}
        self._write(layer, head, links)
        return {slot: rows for slot, rows in lost.items() if rows}

    def forget(self, numbers: Int64) -> Int32:
        """These blocks are lost; returns how many rows each cluster had in them, ``[layers, kv_heads, slots]``."""
        gone = np.isin(self.number, numbers)
        lost: Int32 = np.where(gone, self.rows, 0).sum(3, dtype=np.int32)
        self.rows[gone], self.number[gone] = 0, -1
        return lost

    def _write(self, layer: int, head: int, links: Mapping[int, list[Link]]) -> None:
        for slot, of_slot in links.items():
            of_slot.sort(key=lambda link: link.rows)
            count = len(of_slot)
            self.number[layer, head, slot, :count] = [link.number for link in of_slot]
            self.rows[layer, head, slot, :count] = [link.rows for link in of_slot]
            self.number[layer, head, slot, count:], self.rows[layer, head, slot, count:] = -1, 0


def shortened(store: Store, links: list[Link]) -> int:
    """Join those of like sizes until there are few enough, and put what is left to put; returns rows that are lost."""
    lost = 0
    while len(links) > LINKS:
        links.sort(key=lambda link: link.rows)
        small, large = min(pairwise(links), key=lambda pair: pair[1].rows / pair[0].rows)  # of equals the smallest
        if small.block is None and large.block is not None:
            small, large = large, small  # the one that is not in the store yet joins the other
        if small.block is None:
            [small.block] = store.get([small.number])
            store.drop([small.number])
        links.remove(small)
        if small.block is None:
            lost += small.rows
        elif store.append(large.number, small.block):
            large.rows += small.rows
        else:
            lost += large.rows
            links.remove(large)
            links.append(Link(small.rows, block=small.block))
    for link in links:
        if link.block is not None:
            link.number, link.block = store.put(link.block), None
    return lost
