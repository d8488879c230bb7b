"""The threads of a store: one writes blocks to its file, others read them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from edgevlm.runtime.files import reason
from edgevlm.runtime.store.block import Block, BlockRecord
from edgevlm.runtime.store.file import StoreFile
from edgevlm.runtime.store.ring import MAX_RECORDS
from edgevlm.runtime.store.tables import StoreTables

READERS = 2
PATIENCE_S = 10.0  # that the caller waits for one write
RETRY_S = 30.0  # from one try to the next while the disk fails


class Readers:
    """Reads blocks asked for before blocks to prefetch. The lock is held for all methods but get and close.

    nbytes: of records to prefetch that are not read yet.
    """

    def __init__(self, tables: StoreTables) -> None:
        self._tables = tables
        self._work, self._ready = threading.Condition(tables.lock), threading.Condition(tables.lock)
        self._asked: deque[int] = deque()
        self._prefetch: dict[int, int] = {}  # bytes by number, in the order in which they came
        self.nbytes = 0
        self._reading: dict[int, object] = {}  # by number, a token: a read whose token is another one by now is stale
        self._getting = threading.Lock()  # over the two that follow
        self._wanted: frozenset[int] = frozenset()  # what get() waits for, and what of it there is
        self._found: dict[int, Block | None] = {}
        self._closing = False
        count = READERS if tables.file is not None else 0
        self._threads = [threading.Thread(target=self._run, name="edgevlm-store-read", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def prefetch(self, number: int, nbytes: int) -> None:
        if number not in self._prefetch and number not in self._reading:
            self._prefetch[number] = nbytes
            self.nbytes += nbytes
            self._work.notify()

    def forget(self, number: int) -> None:
        """Discard the read of a block that has changed or is gone."""
        if self._reading.pop(number, None) is not None and number in self._wanted:
            self._asked.append(number)  # another thread waits for it
            self._work.notify()
        self.nbytes -= self._prefetch.pop(number, 0)

    def get(self, numbers: Sequence[int]) -> dict[int, Block | None]:
        """Return blocks, each named once; None for a lost one. Reads too, and waits for those that a thread is reading."""
        with self._getting:
            with self._tables.lock:
                self._wanted, self._found = frozenset(numbers), {}
                for number in numbers:
                    if number not in self._reading:
                        self.forget(number)
                        self._asked.append(number)
                self._work.notify(max(0, len(self._asked) - 1))
            while True:
                with self._tables.lock:
                    if not self._asked:
                        self._ready.wait_for(lambda: len(self._found) == len(self._wanted))
                        found, self._wanted, self._found = self._found, frozenset(), {}
                        return found
                    number, token = self._take()
                self._read(number, token)

    def close(self, patience_s: float) -> bool:
        """Without the lock. Returns whether all threads have ended: one may wait for a disk that does not answer."""
        with self._tables.lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join(patience_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._tables.lock:
                self._work.wait_for(lambda: self._closing or self._asked or self._prefetch)
                if self._closing:
                    return
                number, token = self._take()
            self._read(number, token)
            self._tables.send_messages()

    def _take(self) -> tuple[int, object]:
        number = self._asked.popleft() if self._asked else next(iter(self._prefetch))
        self.forget(number)
        token = self._reading[number] = object()
        return number, token

    def _read(self, number: int, token: object) -> None:
        block = None
        try:
            if (rows := self._tables.rows(number)) is not None:
                block = rows[0]
        except MemoryError:  # the block is still where it was
            pass
        finally:
            with self._tables.lock:
                if self._reading.get(number) is token:
                    self._finish(number, block)

    def _finish(self, number: int, block: Block | None) -> None:
        del self._reading[number]
        if block is not None:
            self._tables.memory.cache(number, block)
        if number in self._wanted:
            self._found[number] = block
            if len(self._found) == len(self._wanted):
                self._ready.notify_all()


class Writer:
    """Writes the blocks in ``tables.to_write``, oldest first, and tries again every ``retry_s`` while that fails.

    failing: the disk refused the last block, or has not answered for ``patience_s``; then nothing waits for it.
    """

    def __init__(self, tables: StoreTables, file: StoreFile, patience_s: float, retry_s: float) -> None:
        self._tables, self._file, self._patience_s, self._retry_s = tables, file, patience_s, retry_s
        self.failing = False
        self._retry_at = 0.0
        self._handled = 0  # blocks, written or not
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="edgevlm-store-write", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait, with the lock held, until a block has been handled; False if waiting is useless."""
        if self.failing or not self._tables.to_write:
            return False
        before = self._handled
        if not self._tables.changed.wait_for(lambda: self._handled != before or self.failing, self._patience_s):
            self._fail("the disk does not answer")
        return not self.failing

    def sync(self) -> None:
        """Flush everything put until now to the disk, as far as possible. Without the lock."""
        with self._tables.changed:
            for _ in range(len(self._tables.to_write)):  # what comes meanwhile is not waited for
                if not self.wait():
                    break
        try:
            self._file.sync()
        except OSError as error:
            with self._tables.changed:
                self._fail(self._why(error))
        self._tables.send_messages()

    def close(self) -> bool:
        """Write what is left, if the disk takes it, and end. Returns whether the thread has ended."""
        with self._tables.changed:
            while self.wait():
                pass
            self._closing, self._retry_at = True, 0.0
            self._tables.changed.notify_all()
        self._thread.join(self._patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        tables = self._tables
        while True:
            with tables.changed:
                while not self._closing and not self._due():
                    wait_s = max(0.0, self._retry_at - time.monotonic()) if self.failing and tables.to_write else None
                    tables.changed.wait(wait_s)
                if not self._due():
                    return
                number = next(iter(tables.to_write))
            try:
                self._write(number)
            except (OSError, MemoryError) as error:
                with tables.changed:
                    self._fail(self._why(error))
            tables.send_messages()

    def _due(self) -> bool:
        return bool(self._tables.to_write) and (not self.failing or time.monotonic() >= self._retry_at)

    def _write(self, number: int) -> None:
        """Write the oldest record of a block, or join all if there would be too many. Raises OSError.

        Blocks at the head are written again after it while the file has slack, so that old blocks are lost only when it is
        nearly full.
        """
        tables, ring = self._tables, self._tables.ring
        with tables.changed:
            unwritten = tables.memory.find(number).unwritten
            if not unwritten:
                return self._done(number)
            too_many = len(ring.blocks.records_of(number)) + len(unwritten) > MAX_RECORDS
        if too_many:
            return self._compact(number)
        record = unwritten[0]
        with tables.changed:
            slack = ring.has_slack(record.nbytes, tables.memory.unwritten)
            ahead = ring.ahead(record.nbytes) if slack else []
        for other in ahead:
            self._compact(other)
        with tables.changed:
            if number in ahead or (slack and ring.ahead(record.nbytes)):  # that has another number since: once more
                return None
            if (place := ring.place(record.nbytes)) is None:
                tables.queue_once("large", f"{self._file.name}: a cluster is larger than it may grow; such stay in host memory")
                return self._done(number)
            extent, lost = place
            for other in lost:
                tables.queue_once("full", f"{self._file.name} is as large as it may be: the oldest clusters are overwritten")
                tables.lose(other)
        record.seal(number, extent.stamp)
        self._file.write(record.buffer.data, extent.offset)
        with tables.changed:
            ring.written(number, extent)
            tables.stats.bytes_written += record.nbytes
            if tables.memory.written(number, record) or number not in ring.blocks:
                tables.to_write.pop(number, None)
            if self.failing:
                tables.queue_message(f"{self._file.name}: written again")
                self.failing = False
            self._count()
        return None

    def _compact(self, number: int) -> None:
        """Join a block's records, in the file and unwritten, into one to be written."""
        tables = self._tables
        found = tables.rows(number)
        record = BlockRecord.of(found[0]) if found is not None else None
        with tables.changed:
            if found is None or record is None or number not in tables.ring.blocks:
                return self._done(number)
            tables.ring.clear(number)
            tables.memory.replace(number, found[1], record)
            tables.to_write.setdefault(number)
            while tables.memory.used > tables.memory.limit and tables.memory.evict():
                pass
        return None

    def _done(self, number: int) -> None:
        self._tables.to_write.pop(number, None)
        self._count()

    def _count(self) -> None:
        self._handled += 1
        self._tables.changed.notify_all()

    def _fail(self, why: str) -> None:
        if not self.failing:
            self._tables.queue_message(
                f"{self._file.name}: not written ({why}): new clusters stay in host memory, where those used least lately give "
                f"way, and every {self._retry_s:g} s it is tried again"
            )
        self.failing = True
        self._retry_at = time.monotonic() + self._retry_s
        self._count()

    def _why(self, error: OSError | MemoryError) -> str:
        return reason(error, self._file.path.parent) if isinstance(error, OSError) else "there is no memory for it"
