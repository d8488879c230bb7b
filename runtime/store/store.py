"""Keep blocks in host memory and in one file. Both have a size limit. Background threads write and prefetch blocks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.progress import Lost, Notify
from edgevlm.runtime.files import reason
from edgevlm.runtime.store.block import ALIGNMENT, HEADER, Block, BlockRecord, header_of, joined, read_record, record_bytes
from edgevlm.runtime.store.file import START, Extent, StoreFile

MIN_BYTES = 1_000_000
READERS = 2
PATIENCE_S = 10.0
RETRY_S = 30.0
CROWDED = 0.75  # if a larger fraction of the file is in use, a write overwrites old blocks instead of moving them
CLEARED = 1 << 20
MIN_ROWS = 64
_REMOVED = -1  # the offset of a removed block; offset 0 means that the block is not in the file
_PLACE = np.dtype([("offset", np.int64), ("nbytes", np.int64), ("stamp", np.uint64)])


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The limits of a store, in bytes. If ``file_bytes`` is 0, there is no file. Raises UserError if a limit is too small."""

    file_bytes: int = 8_000_000_000
    host_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        if self.host_bytes < MIN_BYTES:
            raise UserError(f"--host-bytes {self.host_bytes:,} is too small; give 1M or more")
        if self.file_bytes and self.file_bytes < MIN_BYTES:
            raise UserError(f"--store-bytes {self.file_bytes:,} is too small; give 1M or more, or 0 for no file")


@dataclass(slots=True)
class StoreStats:
    """Counters of a store.

    ``hits``: how many blocks were found in host memory. ``reads``: how many blocks were read from the file. ``bytes_host``,
    ``bytes_disk``, ``bytes_written``: the bytes found in host memory, read from the file and written to it.
    """

    hits: int = 0
    bytes_host: int = 0
    bytes_disk: int = 0
    reads: int = 0
    bytes_written: int = 0
    lost: int = 0  # includes damaged blocks
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """How many bytes a store uses, and the store's counters."""

    host_bytes: int
    file_bytes: int
    index_bytes: int
    stats: StoreStats


class BlockTable:
    """A table of where blocks are in the file, by block number.

    Block numbers are added in ascending order and removed in any order. ``live``: the records' total size in bytes.
    """

    def __init__(self) -> None:
        self._number, self._place = np.zeros(MIN_ROWS, np.int64), np.zeros(MIN_ROWS, _PLACE)
        self._used = self.live = 0

    @property
    def nbytes(self) -> int:
        return self._number.nbytes + self._place.nbytes

    def __contains__(self, number: int) -> bool:
        return self._find(number) >= 0

    def _find(self, number: int) -> int:
        at = int(self._number[: self._used].searchsorted(number))
        held = at < self._used and self._number[at] == number and self._place[at]["offset"] != _REMOVED
        return at if held else -1

    def add(self, number: int) -> None:
        if self._used == len(self._number):
            keep = np.flatnonzero(self._place["offset"] != _REMOVED)
            self._used, rows = len(keep), max(MIN_ROWS, 2 * len(keep)) - len(keep)
            self._number = np.concatenate([self._number[keep], np.zeros(rows, np.int64)])
            self._place = np.concatenate([self._place[keep], np.zeros(rows, _PLACE)])
        self._number[self._used], self._place[self._used] = number, (0, 0, 0)
        self._used += 1

    def extent(self, number: int) -> Extent | None:
        """Return where a block is in the file, or None if the block is not in the file."""
        at = self._find(number)
        extent = Extent(*self._place[at].item()) if at >= 0 else None
        return extent if extent is not None and extent.offset else None

    def place(self, number: int, extent: Extent | None) -> None:
        """Remember where a block is in the file. ``extent``: None if the block is not in the file."""
        at = self._find(number)
        self.live += (extent.nbytes if extent else 0) - int(self._place[at]["nbytes"])
        self._place[at] = extent or (0, 0, 0)

    def remove(self, number: int) -> None:
        self.place(number, None)
        self._place[self._find(number)]["offset"] = _REMOVED

    def between(self, begin: int, end: int) -> list[tuple[int, Extent]]:
        """Return the number and the extent of each block whose record begins in ``[begin, end)``, in file order."""
        place = self._place[: self._used]
        at = np.flatnonzero((place["offset"] >= begin) & (place["offset"] < end))
        at = at[np.argsort(place["offset"][at])]
        return [(number, Extent(*row)) for number, row in zip(self._number[at].tolist(), place[at].tolist(), strict=True)]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray]:
        """Return copies of the numbers of all blocks and of their extents in the file."""
        held = self._place["offset"][: self._used] != _REMOVED
        return self._number[: self._used][held], self._place[: self._used][held]


class Store:
    """A store of numbered blocks in host memory and in one file. A block that is in neither host memory nor the file is lost.

    Any thread may call any method except :meth:`restore` and :meth:`close`. ``path``: the file, created if missing;
    ``temporary`` for an unnamed file, None for host memory only. ``identity``: a text that identifies the stream that owns the
    blocks. ``notify``: a function that any thread calls with a message for the user; by default messages are logged.
    ``patience_s``: the longest time that a caller waits for one write. ``retry_s``: the seconds between attempts to write while
    the disk fails.

    Records are written to the file one after another from START. A record that would exceed the file's limit is written at
    START instead. ``_head`` is the offset of the next record. No block's record begins between ``_head`` and ``_cleared``.

    Raises UserError if the file cannot be written, belongs to a different stream, or is in use by another process.
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
        self.notify = notify or logging.getLogger("edgevlm").warning
        self.stats, self.host_limit = StoreStats(), settings.host_bytes
        self.host_bytes = self._unwritten = 0  # bytes of the blocks in host memory, and of the blocks not yet in the file
        self._table, self._next = BlockTable(), 0
        self._clean: OrderedDict[int, Block] = OrderedDict()  # blocks that are also in the file, most recently used last
        self._dirty: OrderedDict[int, BlockRecord] = OrderedDict()  # blocks that are not in the file, most recently used last
        self._head = self._cleared = START
        self._stamp = int.from_bytes(os.urandom(8), "little")  # random, to differ from the stamps of earlier processes
        self._changed = threading.Condition(threading.RLock())
        self._editing = threading.Lock()  # held while a block changes in several steps; acquired before ``_changed``
        self._ahead: dict[int, tuple[Future[Block | None], int]] = {}
        self._readers = ThreadPoolExecutor(READERS, "edgevlm-store-read")
        self._lost: list[int] = []
        self._messages: list[str] = []
        self._noted: set[str] = set()
        self._patience_s, self._retry_s = patience_s, retry_s
        self._failing = self._closing = False
        self._retry_at, self._handled, self._waiting = 0.0, 0, 0
        self._writer = threading.Thread(target=self._write_all, name="edgevlm-store-write", daemon=True)
        if self._file is not None:
            self._writer.start()

    @property
    def file_bytes(self) -> int:
        return self._file.nbytes if self._file is not None else 0

    @property
    def index_bytes(self) -> int:
        return self._table.nbytes

    def put(self, block: Block) -> int:
        """Store a copy of a block, and return the block's number. Numbers count from 0. Disk errors do not raise exceptions."""
        record = BlockRecord.of(block)
        with self._changed:
            self._make_room(record.buffer.nbytes)
            number, self._next = self._next, self._next + 1
            self._table.add(number)
            self._hold(number, record)
        self._send_messages()
        return number

    def append(self, number: int, block: Block) -> bool:
        """Add rows to a block. If the block is lost, the rows are discarded and False is returned."""
        with self._editing:
            if (held := self._fetch([number])[number]) is None:
                return False
            record = BlockRecord.of(joined([held, block]))
            with self._changed:
                self._make_room(record.buffer.nbytes)
                if number in self._table:
                    self._forget(number)
                    self._table.place(number, None)
                    self._hold(number, record)
        self._send_messages()
        return True

    def renumber(self, numbers: Sequence[int]) -> range:
        """Renumber the blocks with the next free numbers, in order, and return the new numbers. Lost blocks are skipped."""
        with self._editing, self._changed:
            first = self._next
            for number in map(int, numbers):
                if number in self._table:
                    new, self._next = self._next, self._next + 1
                    extent = self._table.extent(number)
                    self._table.remove(number)
                    self._table.add(new)
                    self._table.place(new, extent)
                    both: tuple[OrderedDict[int, Any], ...] = (self._clean, self._dirty)
                    for held in both:
                        if number in held:
                            held[new] = held.pop(number)
                            held.move_to_end(new, last=False)
            return range(first, self._next)

    def resident(self, number: int) -> bool:
        """Return whether a block is in host memory, where :meth:`get` finds it without reading the file."""
        with self._changed:
            return int(number) in self._clean or int(number) in self._dirty

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Start reading blocks from the file in other threads, up to half of the host memory limit."""
        with self._changed:
            free = self.host_limit // 2 - sum(nbytes for _, nbytes in self._ahead.values())
            for number in map(int, numbers):
                if self._use(number) is None and number not in self._ahead and (extent := self._table.extent(number)):
                    free -= extent.nbytes
                    if free < 0:
                        break
                    self._ahead[number] = self._readers.submit(self._read_ahead, number), extent.nbytes

    def get(self, numbers: Sequence[int]) -> list[Block | None]:
        """Return the blocks, including rows added to them later; a lost block is None."""
        asked = list(map(int, numbers))
        found = self._fetch(asked)
        self._send_messages()
        return [found[number] for number in asked]

    def drop(self, numbers: Sequence[int]) -> None:
        with self._editing, self._changed:
            for number in map(int, numbers):
                if number in self._table:
                    self._table.remove(number)
                    self._forget(number)

    def lost(self) -> list[int]:
        """Return the numbers of the blocks lost since the last call, not counting dropped blocks."""
        with self._changed:
            lost, self._lost = self._lost, []
        return lost

    def sync(self) -> None:
        """Write all blocks stored so far to disk, so that :meth:`restore` finds them after a power cut."""
        with self._changed:
            for _ in range(4 * len(self._dirty)):  # limited, because other threads may put more blocks meanwhile
                if not self._wait():
                    break
        if self._file is not None:
            try:
                self._file.sync()
            except OSError as error:
                self._fail(reason(error, self._file.path.parent))
        self._send_messages()

    def state(self) -> Mapping[str, NDArray]:
        """Return the arrays that :meth:`restore` needs. ``numbers`` includes blocks that could not be written to the file."""
        with self._changed:
            while self._wait():
                pass
            numbers, place = self._table.arrays()
            written = place["offset"] > 0
            if self._dirty:
                self._say("only here", f"{len(self._dirty)} clusters are not on disk and are lost when this process ends")
            resident, head, following = [*self._clean, *self._dirty], self._head, self._next
        self._send_messages()
        token = self._file.token if self._file is not None else 0
        return {
            "numbers": numbers, "number": numbers[written], **{name: place[name][written] for name in _PLACE.names or ()},
            "head": np.array(head), "next": np.array(following), "token": np.array(token, np.uint64),
            "resident": np.array(resident, np.int64),
        }  # fmt: skip

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Restore the blocks and block numbers of :meth:`state`. Blocks that are no longer in the file are lost.

        Blocks that were in host memory are read again, so that :meth:`resident` returns the same as before. Raises KeyError or
        ValueError if the state is invalid.
        """
        with self._changed:
            same = self._file if self._file is not None and int(state["token"]) == self._file.token else None
            head, limit = int(state["head"]), self._file.limit if self._file is not None else 0
            self._head = self._cleared = head if START <= head <= limit else START
            found = _whole_records(same, head, state) if same is not None else {}
            for number in state["numbers"].tolist():
                extents = found.get(number, [])
                parts = [read_record(same.read(each), each.stamp) for each in extents] if same and len(extents) > 1 else []
                if not extents or None in parts:
                    self._lost.append(number)
                    continue
                record = BlockRecord.of(joined([part for part in parts if part])) if parts else None
                if record is not None:
                    self._make_room(record.buffer.nbytes)
                self._table.add(number)
                if record is None:
                    self._table.place(number, extents[0])
                else:
                    self._hold(number, record)
            self._next = int(state["next"])
            if self._lost:
                self.stats.lost += len(self._lost)
                total = len(state["numbers"])
                self._messages.append(f"{len(self._lost)} of {total} clusters are lost: missing from the file, or overwritten")
        for number in state["resident"]:
            self.get([number])

    def close(self) -> None:
        """Write the remaining blocks to the file, and close the file. Closing a store again does nothing."""
        self._readers.shutdown(cancel_futures=True)
        if self._file is not None:
            with self._changed:
                while self._wait():
                    pass
                self._closing, self._retry_at = True, 0.0
                self._changed.notify_all()
            self._writer.join(self._patience_s)
            if not self._writer.is_alive():
                self._file.close()
        self._send_messages()

    # methods for host memory; callers must hold the lock ``_changed``

    def _hold(self, number: int, record: BlockRecord) -> None:
        self._dirty[number] = record
        self.host_bytes += record.buffer.nbytes
        self._unwritten += record.buffer.nbytes
        self._changed.notify_all()

    def _use(self, number: int) -> Block | None:
        if number in self._clean:
            self._clean.move_to_end(number)
            return self._clean[number]
        if number in self._dirty:
            self._dirty.move_to_end(number)
            return self._dirty[number].block
        return None

    def _forget(self, number: int) -> None:
        if (block := self._clean.pop(number, None)) is not None:
            self.host_bytes -= record_bytes(block)
        if (record := self._dirty.pop(number, None)) is not None:
            self.host_bytes -= record.buffer.nbytes
            self._unwritten -= record.buffer.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Free host memory: evict blocks that the file also holds, wait until blocks are written, or lose old blocks."""
        while self._unwritten + nbytes > self.host_limit // 2 and self._wait():
            pass
        while self.host_bytes and self.host_bytes + nbytes > self.host_limit:
            if self._clean:
                self._forget(next(iter(self._clean)))
            elif not self._wait():
                if self._file is None:
                    full = f"host memory is full ({self.host_limit:,} bytes)"
                    self._say("host", f"{full}: dropping the least recently used clusters")
                self._lose(next(iter(self._dirty)))

    def _lose(self, number: int) -> None:
        self._table.remove(number)
        self._forget(number)
        self._lost.append(number)
        self.stats.lost += 1

    def _say(self, what: str, message: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._messages.append(message)

    def _send_messages(self) -> None:
        while self._messages:
            with suppress(IndexError, OSError):  # another thread has sent the message, or the terminal is closed
                self.notify(Lost(self._messages.pop(0)))

    # methods for reading; callers must not hold the lock ``_changed``

    def _fetch(self, numbers: Sequence[int]) -> dict[int, Block | None]:
        with self._changed:
            found = {number: self._use(number) for number in numbers}
            here = [block for block in found.values() if block is not None]
            self.stats.hits += len(here)
            self.stats.bytes_host += sum(block.nbytes for block in here)
            extents = {number: self._table.extent(number) for number, block in found.items() if block is None}
            ahead = {number: self._ahead[number][0] for number in extents if number in self._ahead}
        for number, extent in extents.items():
            if number in ahead and ahead[number].cancel():
                del ahead[number]
                with self._changed:
                    self._ahead.pop(number, None)
            if self._file is not None and extent is not None and number not in ahead:
                self._file.expect(extent)
        found |= {number: self._read(number) for number in extents if number not in ahead}
        return found | {number: future.result() for number, future in ahead.items()}

    def _read(self, number: int) -> Block | None:
        while True:
            with self._changed:
                if (held := self._use(number)) is not None or self._file is None or number not in self._table:
                    return held
                extent = self._table.extent(number)
            assert extent is not None, "a block is in host memory or in the file"
            data = self._file.read(extent)
            block = read_record(data, extent.stamp)
            with self._changed:
                self.stats.reads += 1
                self.stats.bytes_disk += len(data)
                if self._table.extent(number) != extent:
                    continue  # the block has been lost or moved meanwhile
                if block is None:
                    self._lose(number)
                    self.stats.damaged += 1
                    self._say("damaged", f"{self._file.name}: a cluster is damaged; damaged clusters are dropped")
                elif number not in self._clean and number not in self._dirty:
                    while self._clean and self.host_bytes + record_bytes(block) > self.host_limit:
                        self._forget(next(iter(self._clean)))
                    if self.host_bytes + record_bytes(block) <= self.host_limit:
                        self._clean[number] = block
                        self.host_bytes += record_bytes(block)
                return block

    def _read_ahead(self, number: int) -> Block | None:
        try:
            return self._read(number)
        finally:
            with self._changed:
                self._ahead.pop(number, None)
            self._send_messages()

    # writing

    def _wait(self) -> bool:
        """Wait until a block has been written. Return False if no write can succeed. The caller must hold ``_changed``."""
        if self._file is None or self._failing or not self._dirty:
            return False
        before = self._handled
        self._waiting += 1
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: self._handled != before or self._failing, self._patience_s):
            self._fail("the disk does not respond")
        self._waiting -= 1
        return not self._failing

    def _due(self) -> bool:
        """Return whether to write blocks now. Blocks may still grow, so writing is delayed as long as possible."""
        if self._failing and time.monotonic() < self._retry_at:
            return False
        hurry = self._waiting or self._closing or self._failing or self._unwritten > self.host_limit // 8
        return bool(self._dirty and hurry)

    def _write_all(self) -> None:
        assert self._file is not None
        while True:
            with self._changed:
                while not self._due():
                    if self._closing:
                        return
                    pause = self._retry_at - time.monotonic() if self._failing and self._dirty else None
                    self._changed.wait(max(0.0, pause) if pause is not None else None)
            try:
                self._write(self._file)
            except OSError as error:
                self._fail(reason(error, self._file.path.parent))
            except MemoryError:
                self._fail("out of memory")
            self._send_messages()

    def _write(self, file: StoreFile) -> None:
        """Write the least recently used unwritten block to the file. Raises OSError.

        Blocks that would be overwritten are read first, and written again later. If the file is nearly full, overwritten blocks
        are lost.
        """
        with self._changed:
            if not self._dirty:
                return
            number, record = next(iter(self._dirty.items()))
            nbytes = record.buffer.nbytes
            if nbytes > file.limit - START:
                self._say("large", f"{file.name}: a cluster exceeds the file's size limit and is lost")
                return self._lose(number)
            if self._head + nbytes > file.limit:
                self._head = self._cleared = START
            begin = max(self._head, self._cleared)
            if self._head + nbytes > self._cleared:
                self._cleared = min(file.limit, max(self._head + nbytes, begin + min(CLEARED, self.host_limit // 16)))
            crowded = self._table.live + self._unwritten > CROWDED * file.limit or nbytes > (1 - CROWDED) * file.limit
            self._stamp = (self._stamp + 1) % 2**64
            extent = Extent(self._head, nbytes, self._stamp)
        while True:
            with self._changed:
                in_the_way = self._table.between(begin, self._cleared)
            if not in_the_way:
                break
            for other, place in in_the_way:
                block = None if crowded else self._read(other)
                with self._changed:
                    if self._table.extent(other) != place:
                        continue  # the block has been lost, moved or renumbered meanwhile
                    if block is None:
                        self._say("full", f"{file.name} has reached its size limit: overwriting the oldest clusters")
                        self._lose(other)
                    else:
                        self._forget(other)
                        self._table.place(other, None)
                        self._hold(other, BlockRecord.of(block))
        record.seal(number, extent.stamp)
        file.write(record.buffer.data, extent.offset)
        with self._changed:
            self._head = extent.offset + nbytes
            self.stats.bytes_written += nbytes
            now = next((at for at, held in self._dirty.items() if held is record), None)  # the block may have been renumbered
            if now is not None:
                self._forget(now)
                self._clean[now] = record.block
                self.host_bytes += nbytes
                self._table.place(now, extent)
            if self._failing:
                self._messages.append(f"{file.name}: writing resumed")
                self._failing = False
            self._handled += 1
            self._changed.notify_all()
        return None

    def _fail(self, why: str) -> None:
        with self._changed:
            if not self._failing and self._file is not None:
                self._messages.append(
                    f"{self._file.name}: cannot be written ({why}): keeping new clusters in host memory, "
                    f"dropping the least recently used; retrying every {self._retry_s:g} s"
                )
            self._failing, self._retry_at = True, time.monotonic() + self._retry_s
            self._changed.notify_all()


def _whole_records(file: StoreFile, head: int, state: Mapping[str, NDArray]) -> dict[int, list[Extent]]:
    """Return where the file holds the blocks of a saved state, by block number. Damaged records are ignored.

    Versions up to 2026-11-23 wrote several records per block. The store overwrites records in file order, from ``head`` to the
    end and then from the start to ``head``. In each of these two parts, overwritten records therefore come before whole ones.
    """
    order = np.argsort(state["offset"], kind="stable")
    fields = [state[name][order].tolist() for name in ("number", "offset", "nbytes", "stamp")]
    count, end = Counter(state["number"].tolist()), min(file.limit, file.nbytes)
    records = [(number, Extent(*place)) for number, *place in zip(*fields, strict=True)]
    found = dict[int, list[Extent]]()
    for after_head in (True, False):
        whole = False
        for number, extent in records:
            if (extent.offset >= head) == after_head and extent.offset + extent.nbytes <= end:
                if not whole:
                    header = header_of(file.read(Extent(extent.offset, HEADER.size, 0)))
                    whole = header is not None and header.stamp == extent.stamp
                if whole:
                    found.setdefault(number, []).append(extent)
    return {number: extents for number, extents in found.items() if len(extents) == count[number]}
