"""Threads that read blocks from the file of a store before they are asked for, and beside who asks for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from edgevlm.runtime.store.block import Block
from edgevlm.runtime.store.core import Core

THREADS = 2


class Readers:
    """What is asked for is read before what is expected. Methods are called with the lock held, but get and close.

    ``nbytes``: of records expected and not read yet.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._work, self._ready = threading.Condition(core.lock), threading.Condition(core.lock)
        self._asked: deque[int] = deque()
        self._expected: dict[int, int] = {}  # bytes by number, in the order in which they were
        self.nbytes = 0
        self._reading: dict[int, object] = {}  # by number, a ticket: who has another must not say what it has read
        self._wanted: frozenset[int] = frozenset()  # what get() waits for, and what of it there is
        self._found: dict[int, Block | None] = {}
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name="edgevlm-store-read", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def expect(self, number: int, nbytes: int) -> None:
        if number not in self._expected and number not in self._reading:
            self._expected[number] = nbytes
            self.nbytes += nbytes
            self._work.notify()

    def forget(self, number: int) -> None:
        """What is being read of a block is of no use: it has more rows now, or is gone."""
        self._reading.pop(number, None)
        self.nbytes -= self._expected.pop(number, 0)

    def get(self, numbers: Sequence[int]) -> dict[int, Block | None]:
        """Blocks, each named once; None for one that is lost. Reads them too, and waits for those that a thread is reading."""
        with self._core.lock:
            self._wanted, self._found = frozenset(numbers), {}
            for number in numbers:
                if number not in self._reading:
                    self.forget(number)
                    self._asked.append(number)
            self._work.notify(max(0, len(self._asked) - 1))
        while True:
            with self._core.lock:
                if not self._asked:
                    self._ready.wait_for(lambda: len(self._found) == len(self._wanted))
                    found, self._wanted, self._found = self._found, frozenset(), {}
                    return found
                number, ticket = self._take()
            self._read(number, ticket)

    def close(self, patience_s: float) -> bool:
        """Without the lock. Returns whether all have ended: one waits for a disk that does not answer."""
        with self._core.lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join(patience_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._core.lock:
                self._work.wait_for(lambda: self._closing or self._asked or self._expected)
                if self._closing:
                    return
                number, ticket = self._take()
            self._read(number, ticket)
            self._core.tell()

    def _take(self) -> tuple[int, object]:
        number = self._asked.popleft() if self._asked else next(iter(self._expected))
        self.forget(number)
        ticket = self._reading[number] = object()
        return number, ticket

    def _read(self, number: int, ticket: object) -> None:
        block = None
        try:
            if (rows := self._core.rows(number)) is not None:
                block = rows[0]
        except MemoryError:  # the block is still where it was
            pass
        finally:
            with self._core.lock:
                if self._reading.get(number) is ticket:
                    self._read_as(number, block)

    def _read_as(self, number: int, block: Block | None) -> None:
        del self._reading[number]
        if block is not None:
            self._core.memory.cache(number, block)
        if number in self._wanted:
            self._found[number] = block
            if len(self._found) == len(self._wanted):
                self._ready.notify_all()
