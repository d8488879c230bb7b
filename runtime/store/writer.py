"""The thread that writes blocks to the file of a store, and what becomes of them when the disk fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from edgevlm.runtime.atomic import reason
from edgevlm.runtime.store.core import Core
from edgevlm.runtime.store.file import StoreFile
from edgevlm.runtime.store.log import CHAIN
from edgevlm.runtime.store.record import copied, seal

PATIENCE_S = 10.0  # that the stream waits for one write
RETRY_S = 30.0  # from one try to the next while the disk fails


class Writer:
    """Writes what :class:`Core` has waiting, oldest first, and tries again every RETRY_S seconds while that fails.

    ``failing``: the disk did not take the last block, or has not answered for PATIENCE_S; nobody waits for it then.
    """

    def __init__(self, core: Core, file: StoreFile, patience_s: float = PATIENCE_S, retry_s: float = RETRY_S) -> None:
        self._core, self._file, self._patience_s, self._retry_s = core, file, patience_s, retry_s
        self.failing = False
        self._retry_at = 0.0
        self._turns = 0  # blocks dealt with
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="edgevlm-store", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait, with the lock held, until a block has been dealt with; False where nothing can be hoped for."""
        if self.failing or not self._core.waiting:
            return False
        before = self._turns
        if not self._core.changed.wait_for(lambda: self._turns != before or self.failing, self._patience_s):
            self._fail("the disk does not answer")
        return not self.failing

    def sync(self) -> None:
        """See everything put until now onto the disk, as far as it can be. Without the lock."""
        with self._core.changed:
            for _ in range(len(self._core.waiting)):  # what comes meanwhile is not waited for
                if not self.wait():
                    break
        try:
            self._file.sync()
        except OSError as error:
            with self._core.changed:
                self._fail(_why(error, self._file.path))
        self._core.tell()

    def close(self) -> bool:
        """Write what is waiting, if the disk takes it, and end. Returns whether it has: a write may not come back."""
        with self._core.changed:
            while self.wait():
                pass
            self._closing, self._retry_at = True, 0.0
            self._core.changed.notify_all()
        self._thread.join(self._patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        core = self._core
        while True:
            with core.changed:
                while not self._closing and not self._due():
                    core.changed.wait(max(0.0, self._retry_at - time.monotonic()) if self.failing and core.waiting else None)
                if not self._due():
                    return
                number = next(iter(core.waiting))
            try:
                self._write(number)
            except OSError as error:
                with core.changed:
                    self._fail(_why(error, self._file.path))
            except MemoryError:
                with core.changed:
                    self._fail("there is no memory for it")
            core.tell()

    def _due(self) -> bool:
        return bool(self._core.waiting) and (not self.failing or time.monotonic() >= self._retry_at)

    def _write(self, number: int) -> None:
        """Write the oldest part of a block, or make one of all when its records would be too many. Raises OSError.

        What the head comes to is written again behind it, as long as the file has slack: a block is lost for its age only where
        those in use nearly fill it.
        """
        core, ring = self._core, self._core.ring
        with core.changed:
            held = core.memory.find(number)
            parts = list(held.parts) if held is not None else []
            if not parts:
                return self._done(number)
            many = len(ring.blocks.chain(number)) + len(parts) > CHAIN
        if many:
            return self._compact(number)
        part = parts[0]
        with core.changed:
            slack = ring.has_slack(part.nbytes, core.memory.unwritten)
            ahead = ring.ahead(part.nbytes) if slack else []
        for other in ahead:
            self._compact(other)
        with core.changed:
            if number in ahead or (slack and ring.ahead(part.nbytes)):  # that has another number since: once more
                return None
            place = ring.place(part.nbytes)
            if place is None:
                core.say_once("large", f"{self._file.name}: a cluster is larger than it may grow; such stay in host memory")
                return self._done(number)
            for lost in place.lost:
                core.say_once("full", f"{self._file.name} is as large as it may be: the oldest clusters are overwritten")
                core.lose(lost)
        seal(part, number, place.extent.stamp)
        self._file.write(part.buffer.data, place.extent.offset)
        with core.changed:
            ring.written(number, place.extent)
            core.stats.bytes_written += part.nbytes
            if core.memory.written(number, part) or number not in ring.blocks:
                core.waiting.pop(number, None)
            self._went_well()

    def _compact(self, number: int) -> None:
        """Make one part of a block's records and its parts, to be written; the records are of no use then."""
        core = self._core
        found = core.rows(number)
        one = copied(found[0]) if found is not None else None
        with core.changed:
            if found is None or one is None or number not in core.ring.blocks:
                return self._done(number)
            core.ring.clear(number)
            core.memory.replace(number, found[1], one)
            core.waiting.setdefault(number)
            while core.memory.used > core.memory.limit and core.memory.let_go():
                pass

    def _done(self, number: int) -> None:
        self._core.waiting.pop(number, None)
        self._turned()

    def _went_well(self) -> None:
        if self.failing:
            self._core.say(f"{self._file.name}: written again")
        self.failing = False
        self._turned()

    def _turned(self) -> None:
        self._turns += 1
        self._core.changed.notify_all()

    def _fail(self, why: str) -> None:
        if not self.failing:
            self._core.say(
                f"{self._file.name}: not written ({why}): new clusters stay in host memory, where those used least lately give "
                f"way, and every {self._retry_s:g} s it is tried again"
            )
        self.failing = True
        self._retry_at = time.monotonic() + self._retry_s
        self._turned()


def _why(error: OSError, path: Path) -> str:
    return reason(error, path.parent)
