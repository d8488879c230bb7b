"""What the stream's thread, the writer and the readers of a store share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.file import StoreFile
from edgevlm.runtime.store.memory import Held, Memory
from edgevlm.runtime.store.record import read
from edgevlm.runtime.store.ring import Ring

if TYPE_CHECKING:
    from edgevlm.runtime.store import StoreStats

Notify = Callable[[str], object]


class Core:
    """The tables of a store, under one lock. ``changed``, over that lock, is for the writer and those who wait for it.

    file: None for host memory alone. Methods but :meth:`rows` and :meth:`tell` are called with the lock held.
    """

    def __init__(self, file: StoreFile | None, host_bytes: int, notify: Notify) -> None:
        from edgevlm.runtime.store import StoreStats

        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.file = file
        self.ring = Ring(file.limit if file is not None else 0)
        self.memory = Memory(host_bytes)
        self.stats: StoreStats = StoreStats()
        self.waiting: dict[int, None] = {}  # blocks with parts to be written, in the order in which they came
        self.lost: list[int] = []
        self.notify = notify
        self._said: set[str] = set()
        self._lines: list[str] = []

    def lose(self, number: int, damaged: bool = False) -> None:
        """A block is gone."""
        if number in self.ring.blocks:
            self.ring.remove(number)
        self.forget(number)
        self.lost.append(number)
        self.stats.lost += 1
        if damaged:
            self.stats.damaged += 1
            self.say_once("damaged", f"{self._name}: a cluster in it is damaged; it is dropped, and so will others be")

    def forget(self, number: int) -> None:
        """Nothing more is to be done with a block that is in no table."""
        self.memory.drop(number)
        self.waiting.pop(number, None)

    def renumber(self, number: int, new: int) -> None:
        """A block that is there has another number, larger than all there were."""
        self.ring.renumber(number, new)
        self.memory.renumber(number, new)
        if number in self.waiting:
            del self.waiting[number]
            self.waiting[new] = None

    def rows(self, number: int) -> tuple[Block, int] | None:
        """All rows of a block, from the file and from its parts, and how many parts those were; None for one that is lost.

        For any thread, without the lock. Where the file has something else than it should, the block is lost.
        """
        while True:
            with self.changed:
                if number not in self.ring.blocks:
                    return None
                held = self.memory.find(number) or Held()
                if held.whole is not None:
                    return held.whole, len(held.parts)
                extents, parts = self.ring.extents(number), list(held.parts)
            data = [self.file.read(extent) for extent in extents] if self.file is not None else []
            found = [read(each, extent.stamp) for each, extent in zip(data, extents, strict=True)]
            blocks = [block for block in found if block is not None]
            with self.changed:
                self.stats.reads += len(data)
                self.stats.bytes_disk += sum(map(len, data))
                if len(blocks) < len(extents):
                    if number in self.ring.blocks and self.ring.extents(number) == extents:
                        self.lose(number, damaged=True)
                    continue  # it has been lost, or written elsewhere
            blocks += [part.block for part in parts]
            return blocks[0] if len(blocks) == 1 else joined(blocks), len(parts)

    @property
    def _name(self) -> str:
        return self.file.name if self.file is not None else "the store"

    def say(self, line: str) -> None:
        """To be told when the lock is free."""
        self._lines.append(line)

    def say_once(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.say(line)

    def tell(self) -> None:
        """Tell what there is to tell; for any thread, without the lock."""
        while self._lines:
            with suppress(IndexError, OSError):  # another thread has told it; a terminal that went away is no reason to stop
                self.notify(self._lines.pop(0))
