"""The tables of a store, shared by the caller's thread, the writer and the readers under one lock."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass

from edgevlm.progress import Notify
from edgevlm.runtime.store.block import Block, joined, read_record
from edgevlm.runtime.store.file import StoreFile
from edgevlm.runtime.store.host_memory import HostMemory
from edgevlm.runtime.store.ring import Ring


@dataclass(slots=True)
class StoreStats:
    """Counted since the store was opened.

    hits, bytes_host: of ``get`` in host memory. wait_ms: of ``get`` for blocks that were not there.
    """

    hits: int = 0
    bytes_host: int = 0
    bytes_disk: int = 0  # read from the file
    reads: int = 0  # of the file
    wait_ms: float = 0.0
    bytes_written: int = 0  # to the file
    lost: int = 0  # blocks that are gone, for whatever reason, damaged ones included
    damaged: int = 0


class StoreTables:
    """The places of each block's rows. ``changed``, over the lock, is for the writer and threads that wait for it.

    file: None for host memory only. The lock is held for all methods but :meth:`rows` and :meth:`send_messages`.
    """

    def __init__(self, file: StoreFile | None, host_bytes: int, notify: Notify) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.file = file
        self.ring = Ring(file.limit if file is not None else 0)
        self.memory = HostMemory(host_bytes)
        self.stats = StoreStats()
        self.to_write: dict[int, None] = {}  # blocks with unwritten records, in the order in which they came
        self.found_lost: list[int] = []
        self.notify = notify
        self._messages: list[str] = []
        self._noted: set[str] = set()

    @property
    def name(self) -> str:
        return self.file.name if self.file is not None else "the store"

    def lose(self, number: int, *, damaged: bool = False) -> None:
        """Remove a block that is lost."""
        if number in self.ring.blocks:
            self.ring.remove(number)
        self.forget(number)
        self.found_lost.append(number)
        self.stats.lost += 1
        if damaged:
            self.stats.damaged += 1
            self.queue_once("damaged", f"{self.name}: a cluster in it is damaged; it is dropped, and so will others be")

    def forget(self, number: int) -> None:
        """Remove from host memory a block that the ring no longer has."""
        self.memory.drop(number)
        self.to_write.pop(number, None)

    def rename(self, number: int, new: int) -> None:
        """Give a block a new number, larger than all others."""
        self.ring.renumber(number, new)
        self.memory.renumber(number, new)
        if number in self.to_write:
            del self.to_write[number]
            self.to_write[new] = None

    def rows(self, number: int) -> tuple[Block, int] | None:
        """Return all rows of a block, and the number of its unwritten records; None for a lost one.

        For any thread, without the lock. A block whose record in the file is damaged is lost.
        """
        while True:
            with self.lock:
                if number not in self.ring.blocks:
                    return None
                held = self.memory.find(number)
                if held.rows is not None:
                    return held.rows, len(held.unwritten)
                extents, unwritten = self.ring.extents(number), list(held.unwritten)
            data = [self.file.read(extent) for extent in extents] if self.file is not None else []
            found = [read_record(each, extent.stamp) for each, extent in zip(data, extents, strict=True)]
            blocks = [block for block in found if block is not None]
            with self.lock:
                self.stats.reads += len(data)
                self.stats.bytes_disk += sum(map(len, data))
                if len(blocks) < len(extents):
                    if number in self.ring.blocks and self.ring.extents(number) == extents:
                        self.lose(number, damaged=True)
                    continue  # it has been lost, or written elsewhere
            blocks += [record.block for record in unwritten]
            return blocks[0] if len(blocks) == 1 else joined(blocks), len(unwritten)

    def queue_message(self, message: str) -> None:
        """Keep a message for the user until the lock is free."""
        self._messages.append(message)

    def queue_once(self, what: str, message: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self.queue_message(message)

    def send_messages(self) -> None:
        """Send the messages; for any thread, without the lock."""
        while self._messages:
            with suppress(IndexError, OSError):  # another thread has sent it; a terminal that went away is no reason to stop
                self.notify(self._messages.pop(0))
