"""A store over host memory and one file: written through, read ahead, both within their bytes. docs/store.md."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.core import Core, Notify
from edgevlm.runtime.store.file import StoreFile
from edgevlm.runtime.store.readers import Readers
from edgevlm.runtime.store.record import ALIGNMENT, copied
from edgevlm.runtime.store.settings import StoreSettings
from edgevlm.runtime.store.writer import PATIENCE_S, RETRY_S, Writer

if TYPE_CHECKING:
    from edgevlm.runtime.store import StoreStats


class TieredStore:
    """See :class:`edgevlm.runtime.store.Store`: blocks in host memory, and all of them in one file.

    A block is lost once it lies in neither. path: the file, made where it is missing; ``temporary`` for one without a name;
    None for host memory alone. identity: of the stream; a file of another one is refused. notify: is told, from any thread,
    what a person should know; the logger ``edgevlm`` unless given. patience_s: how long one write may keep the stream waiting.
    retry_s: between tries while the disk fails.

    Raises UserError for a file that cannot be made, is another stream's, or is in use by another process.
    """

    def __init__(
        self,
        path: str | Path | None,
        identity: str = "",
        settings: StoreSettings | None = None,
        notify: Notify | None = None,
        *,
        patience_s: float = PATIENCE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.settings = settings or StoreSettings()
        limit = self.settings.file_bytes // ALIGNMENT * ALIGNMENT
        self._file = StoreFile(path, identity, limit) if path is not None and limit else None
        self._core = Core(self._file, self.settings.host_bytes, notify or logging.getLogger("edgevlm").warning)
        self._readers = Readers(self._core)
        self._writer = Writer(self._core, self._file, patience_s, retry_s) if self._file is not None else None
        self._patience_s = patience_s
        self._next = 0

    @property
    def stats(self) -> StoreStats:
        return self._core.stats

    @property
    def notify(self) -> Notify:
        return self._core.notify

    @notify.setter
    def notify(self, notify: Notify) -> None:
        self._core.notify = notify

    @property
    def host_limit(self) -> int:
        return self._core.memory.limit

    @property
    def host_bytes(self) -> int:
        return self._core.memory.used

    @property
    def file_bytes(self) -> int:
        """The file's size, room allocated ahead included."""
        return self._file.nbytes if self._file is not None else 0

    @property
    def index_bytes(self) -> int:
        """Of the tables that say where blocks lie; they grow with the blocks that there are."""
        return self._core.ring.nbytes

    def put(self, block: Block) -> int:
        core, part = self._core, copied(block)
        with core.changed:
            self._make_room(part.nbytes)
            number, self._next = self._next, self._next + 1
            core.ring.blocks.add(number)
            core.memory.put(number, part)
            self._to_be_written(number)
        core.tell()
        return number

    def append(self, number: int, block: Block) -> bool:
        core, part = self._core, copied(block)
        with core.changed:
            self._make_room(part.nbytes)
            there = number in core.ring.blocks
            if there:
                self._readers.forget(number)
                if self._writer is None and (whole := core.memory.whole(number)) is not None:
                    core.memory.put(number, copied(joined([whole, block])))
                else:
                    core.memory.append(number, part)
                self._to_be_written(number)
                self._make_room(0)
        core.tell()
        return there

    def renumber(self, numbers: Sequence[int]) -> range:
        core, first = self._core, self._next
        with core.changed:
            for number in map(int, numbers):
                if number in core.ring.blocks:
                    core.renumber(number, self._next)
                    self._readers.forget(number)
                    self._next += 1
        return range(first, self._next)

    def resident(self, number: int) -> bool:
        with self._core.lock:
            held = self._core.memory.find(int(number))
            return held is not None and (held.whole is not None or not self._core.ring.extents(int(number)))

    def expect(self, numbers: Sequence[int]) -> None:
        """As much of it as half of the host memory holds."""
        core = self._core
        with core.changed:
            for number in map(int, numbers):
                if core.memory.whole(number) is None and number in core.ring.blocks:
                    nbytes = sum(extent.nbytes for extent in core.ring.extents(number))
                    if self._readers.nbytes + nbytes > core.memory.limit // 2:
                        break
                    self._readers.expect(number, nbytes)

    def get(self, numbers: Sequence[int]) -> list[Block | None]:
        """What is returned is the caller's, and may come to more than ``host_bytes``."""
        core, asked = self._core, list(map(int, numbers))
        with core.changed:
            found = {number: core.memory.whole(number) for number in asked}
            here = [block for block in found.values() if block is not None]
            core.stats.hits += len(here)
            core.stats.bytes_host += sum(block.nbytes for block in here)
            missing = [number for number, block in found.items() if block is None and number in core.ring.blocks]
        if missing:
            started = time.perf_counter()
            found |= self._readers.get(missing)
            core.stats.wait_ms += 1e3 * (time.perf_counter() - started)
        core.tell()
        return [found[number] for number in asked]

    def drop(self, numbers: Sequence[int]) -> None:
        core = self._core
        with core.changed:
            for number in map(int, numbers):
                if number in core.ring.blocks:
                    core.ring.remove(number)
                    core.forget(number)
                    self._readers.forget(number)

    def lost(self) -> list[int]:
        with self._core.changed:
            lost, self._core.lost = self._core.lost, []
        return lost

    def sync(self) -> None:
        """See everything put until now onto the disk, as far as it can be."""
        if self._writer is not None:
            self._writer.sync()

    def state(self) -> Mapping[str, NDArray]:
        """Blocks with rows that the disk did not take are in it by name alone; it outlives a power cut after :meth:`sync`."""
        core = self._core
        with core.changed:
            while self._writer is not None and self._writer.wait():
                pass
            state, only_here = core.ring.state(), core.memory.only_here()
            token = self._file.token if self._file is not None else 0
            if only_here:
                core.say_once("only here", f"{len(only_here)} clusters are in no file and will not outlive this process")
        core.tell()
        written = ~np.isin(state["number"], only_here)
        records = {name: state[name][written] for name in ("number", "offset", "nbytes", "stamp")}
        return {**state, **records, "next": np.array(self._next), "token": np.array(token, np.uint64)}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Raises KeyError or ValueError for what is no state."""
        core = self._core
        with core.changed:
            same = self._file is not None and int(state["token"]) == self._file.token
            lost = core.ring.restore(state, self._file if same else None)
            self._next = int(state["next"])
            core.lost += lost
            core.stats.lost += len(lost)
            if lost:
                core.say(f"{len(lost)} of {len(state['numbers'])} clusters are lost: not in the file, or overwritten since")
        core.tell()

    def close(self) -> None:
        """Write what is waiting and let go of the file. Closing it again does nothing."""
        ended = self._readers.close(self._patience_s)
        if self._writer is not None:
            ended = self._writer.close() and ended
        self._core.tell()
        if self._file is not None and ended:
            self._file.close()

    def _make_room(self, nbytes: int) -> None:
        """So that as much can come: forget what the file has too, wait for the writer, then lose what was used least lately."""
        core, memory = self._core, self._core.memory
        while self._writer is not None and memory.unwritten + nbytes > memory.limit // 2 and self._writer.wait():
            pass
        while memory.used and memory.used + nbytes > memory.limit:
            if memory.let_go() or (self._writer is not None and self._writer.wait()):
                continue
            number = memory.first_only_here()
            if number is None:
                break
            if self._writer is None:
                core.say_once("host", f"host memory is full ({memory.limit:,} bytes): the clusters used least lately are lost")
            core.lose(number)

    def _to_be_written(self, number: int) -> None:
        if self._writer is not None:
            self._core.waiting[number] = None
            self._core.changed.notify_all()
