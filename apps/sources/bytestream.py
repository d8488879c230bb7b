"""Bytes from a pipe: read where they belong, without a copy, and given up when the source is closed."""

from __future__ import annotations

import os
import re
import select
import sys

POLL_S = 0.2  # how long a read waits before it looks whether the source was closed
BLOCK = 1 << 16
LONGEST = 4  # bytes that are looked for


class ByteStream:
    """Reads a descriptor, which it does not own. Only what :meth:`peek` and :meth:`find` looked ahead for is buffered."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ahead = bytearray()
        self.closed = False

    def fill(self, view: memoryview) -> int:
        """Read into ``view`` until it is full; returns the bytes read, fewer only at the end."""
        done = min(len(self._ahead), len(view))
        view[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < len(view) and self._wait():
            if not (got := os.readv(self._descriptor, [view[done:]])):
                break
            done += got
        return done

    def peek(self, count: int, start: int = 0) -> bytes:
        """``count`` bytes from ``start`` bytes ahead, left to be read; fewer only at the end."""
        while len(self._ahead) < start + count and self._more():
            pass
        return bytes(self._ahead[start : start + count])

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer only at the end."""
        found = self.peek(count)
        del self._ahead[: len(found)]
        return found

    def find(self, wanted: re.Pattern[bytes], start: int = 0, limit: int = sys.maxsize) -> int:
        """Where ``wanted`` (LONGEST bytes at most) begins, looked for from ``start`` bytes ahead to ``limit``; -1: nowhere."""
        while not (found := wanted.search(self._ahead, start, limit)):
            start = max(start, len(self._ahead) - LONGEST + 1)
            if len(self._ahead) >= limit or not self._more():
                return -1
        return found.start()

    def close(self) -> None:
        """End every read, within POLL_S; from any thread."""
        self.closed = True

    def _more(self) -> bool:
        if not self._wait():
            return False
        block = os.read(self._descriptor, BLOCK)
        self._ahead += block
        return bool(block)

    def _wait(self) -> bool:
        """Until there is something to read; False once closed."""
        while not self.closed:
            if select.select([self._descriptor], [], [], POLL_S)[0]:
                return True
        return False
