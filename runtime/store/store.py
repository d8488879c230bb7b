"""A store of blocks in host memory and one file: written through, read ahead, both within their bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.store.block import ALIGNMENT, Block, BlockRecord, joined
from edgevlm.runtime.store.file import StoreFile
from edgevlm.runtime.store.tables import StoreStats, StoreTables
from edgevlm.runtime.store.threads import PATIENCE_S, RETRY_S, Readers, Writer

MIN_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Limits in bytes; file_bytes 0: host memory only. Raises UserError for less than a store can work with."""

    file_bytes: int = 8_000_000_000
    host_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        if self.host_bytes < MIN_BYTES:
            raise UserError(f"--host-bytes {self.host_bytes:,} is too little; give 1M or more")
        if self.file_bytes and self.file_bytes < MIN_BYTES:
            raise UserError(f"--store-bytes {self.file_bytes:,} is too little; give 1M or more, or 0 for no file")


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Bytes in use now, and what was counted until now."""

    host_bytes: int
    file_bytes: int
    index_bytes: int
    stats: StoreStats


class Store:
    """Blocks by number, in host memory and in one file; a block is lost once it is in neither.

    Any thread may call any method except :meth:`restore` and :meth:`close`. path: the file, made if missing; ``temporary``: one
    without a name; None: host memory only. identity: of the stream. notify: called from any thread with messages for
    the user; by default the logger ``edgevlm``. patience_s: the longest that one write may keep the caller waiting. retry_s:
    between tries while the disk fails.

    Raises UserError for a file that cannot be made, is another stream's, or is in use by another process.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        identity: str = "",
        settings: StoreSettings | None = None,
        notify: Notify | None = None,
        *,
        patience_s: float = PATIENCE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        settings = settings or StoreSettings()
        limit = settings.file_bytes // ALIGNMENT * ALIGNMENT
        self._file = StoreFile(path, identity, limit) if path is not None and limit else None
        self._tables = StoreTables(self._file, settings.host_bytes, notify or logging.getLogger("edgevlm").warning)
        self._readers = Readers(self._tables)
        self._writer = Writer(self._tables, self._file, patience_s, retry_s) if self._file is not None else None
        self._patience_s = patience_s
        self._next = 0

    @property
    def stats(self) -> StoreStats:
        return self._tables.stats

    @property
    def notify(self) -> Notify:
        return self._tables.notify

    @notify.setter
    def notify(self, notify: Notify) -> None:
        self._tables.notify = notify

    @property
    def host_limit(self) -> int:
        """The most bytes of blocks in host memory."""
        return self._tables.memory.limit

    @property
    def host_bytes(self) -> int:
        """Bytes of blocks in host memory now."""
        return self._tables.memory.used

    @property
    def file_bytes(self) -> int:
        """The file's size now, room allocated ahead included."""
        return self._file.nbytes if self._file is not None else 0

    @property
    def index_bytes(self) -> int:
        """Bytes of the tables, which grow with the blocks."""
        return self._tables.ring.nbytes

    def put(self, block: Block) -> int:
        """Keep a copy of a block; returns its number, counted from 0. Never raises for a disk that fails."""
        tables, record = self._tables, BlockRecord.of(block)
        with tables.changed:
            self._evict_for(record.nbytes)
            number, self._next = self._next, self._next + 1
            tables.ring.blocks.add(number)
            tables.memory.put(number, record)
            self._write_soon(number)
        tables.send_messages()
        return number

    def append(self, number: int, block: Block) -> bool:
        """Add rows to a block; False if it is lost, and nothing is kept."""
        tables, record = self._tables, BlockRecord.of(block)
        with tables.changed:
            self._evict_for(record.nbytes)
            there = number in tables.ring.blocks
            if there:
                self._readers.forget(number)
                if self._writer is None and (rows := tables.memory.use(number)) is not None:
                    tables.memory.put(number, BlockRecord.of(joined([rows, block])))
                else:
                    tables.memory.append(number, record)
                self._write_soon(number)
                self._evict_for(0)
        tables.send_messages()
        return there

    def renumber(self, numbers: Sequence[int]) -> range:
        """Give these blocks the next free numbers, in this order; returns those. Lost blocks get none."""
        with self._tables.changed:
            first = self._next
            for number in map(int, numbers):
                if number in self._tables.ring.blocks:
                    self._tables.rename(number, self._next)
                    self._readers.forget(number)
                    self._next += 1
            return range(first, self._next)

    def resident(self, number: int) -> bool:
        """Whether all of a block is in host memory, so that :meth:`get` reads no file. False for a lost one."""
        number = int(number)
        with self._tables.lock:
            held = self._tables.memory.find(number)
            return held.rows is not None or (bool(held.unwritten) and not self._tables.ring.extents(number))

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Begin to read these from the file, up to half of the host memory."""
        tables = self._tables
        with tables.changed:
            for number in map(int, numbers):
                if tables.memory.use(number) is None and number in tables.ring.blocks:
                    nbytes = sum(extent.nbytes for extent in tables.ring.extents(number))
                    if self._readers.nbytes + nbytes > tables.memory.limit // 2:
                        break
                    self._readers.prefetch(number, nbytes)

    def get(self, numbers: Sequence[int]) -> list[Block | None]:
        """Return the blocks, each as it was put, appended rows last; None for a lost one."""
        tables, asked = self._tables, list(map(int, numbers))
        with tables.changed:
            found = {number: tables.memory.use(number) for number in asked}
            here = [block for block in found.values() if block is not None]
            tables.stats.hits += len(here)
            tables.stats.bytes_host += sum(block.nbytes for block in here)
            missing = [number for number, block in found.items() if block is None and number in tables.ring.blocks]
        if missing:
            started = time.perf_counter()
            found |= self._readers.get(missing)
            tables.stats.wait_ms += 1e3 * (time.perf_counter() - started)
        tables.send_messages()
        return [found[number] for number in asked]

    def drop(self, numbers: Sequence[int]) -> None:
        """Delete blocks."""
        tables = self._tables
        with tables.changed:
            for number in map(int, numbers):
                if number in tables.ring.blocks:
                    tables.ring.remove(number)
                    tables.forget(number)
                    self._readers.forget(number)

    def lost(self) -> list[int]:
        """Return the numbers of blocks found lost since the last call, without dropped ones."""
        with self._tables.changed:
            lost, self._tables.found_lost = self._tables.found_lost, []
        return lost

    def sync(self) -> None:
        """Flush everything put until now to the disk, so that a state survives a power cut. From any thread."""
        if self._writer is not None:
            self._writer.sync()

    def state(self) -> Mapping[str, NDArray]:
        """Return the arrays with which a snapshot finds the blocks again. Rows that the disk did not take are only named."""
        tables = self._tables
        with tables.changed:
            while self._writer is not None and self._writer.wait():
                pass
            state, unwritten = tables.ring.state(), list(tables.memory.unwritten_blocks())
            token = self._file.token if self._file is not None else 0
            resident = np.array(list(tables.memory.resident_blocks()), np.int64)
            if unwritten:
                tables.queue_once("only here", f"{len(unwritten)} clusters are in no file and will not outlive this process")
        tables.send_messages()
        written = ~np.isin(state["number"], unwritten)
        records = {name: state[name][written] for name in ("number", "offset", "nbytes", "stamp")}
        numbers = {"next": np.array(self._next), "token": np.array(token, np.uint64), "resident": resident}
        return {**state, **records, **numbers}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Restore :meth:`state`: numbers mean what they meant then; blocks that the store no longer has are lost.

        Blocks that were in host memory are read again: policies depend on it (:meth:`resident`). Raises KeyError or ValueError
        for an invalid state.
        """
        tables = self._tables
        with tables.changed:
            same = self._file is not None and int(state["token"]) == self._file.token
            lost = tables.ring.restore(state, self._file if same else None)
            self._next = int(state["next"])
            tables.found_lost += lost
            tables.stats.lost += len(lost)
            if lost:
                tables.queue_message(
                    f"{len(lost)} of {len(state['numbers'])} clusters are lost: not in the file, or overwritten since"
                )
        tables.send_messages()
        for number in state["resident"]:
            self.get([number])

    def close(self) -> None:
        """Write what is left and release the file. May be called again."""
        ended = self._readers.close(self._patience_s)
        if self._writer is not None:
            ended = self._writer.close() and ended
        self._tables.send_messages()
        if self._file is not None and ended:
            self._file.close()

    def _evict_for(self, nbytes: int) -> None:
        """Evict blocks that the file has, wait for the writer, then lose the least recently used, until ``nbytes`` more fit."""
        tables, memory = self._tables, self._tables.memory
        while self._writer is not None and memory.unwritten + nbytes > memory.limit // 2 and self._writer.wait():
            pass
        while memory.used and memory.used + nbytes > memory.limit:
            if memory.evict() or (self._writer is not None and self._writer.wait()):
                continue
            if (number := next(memory.unwritten_blocks(), None)) is None:
                break
            if self._writer is None:
                tables.queue_once(
                    "host", f"host memory is full ({memory.limit:,} bytes): the clusters used least lately are lost"
                )
            tables.lose(number)

    def _write_soon(self, number: int) -> None:
        if self._writer is not None:
            self._tables.to_write[number] = None
            self._tables.changed.notify_all()
