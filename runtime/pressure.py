"""When the system's memory is short: smaller chunks of frames, until there is enough again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgevlm.progress import Notify

LOW, ENOUGH = 1 / 16, 1 / 8  # of all memory: below the one a chunk halves, above the other it doubles
INTERVAL = 1.0  # seconds from one look to the next
CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can be had before something is killed, of all there are."""

    free: int
    total: int


def available() -> Available:
    """Of this system, or of that control group (v2) around this process that has least."""
    memory = psutil.virtual_memory()
    limited = (_left(group) for group in groups())
    return min([Available(memory.available, memory.total), *filter(None, limited)], key=lambda each: each.free)


def groups() -> list[Path]:
    """The control group (v2) of this process, and those that it is in."""
    try:
        own = next((line[3:] for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::")), "")
    except OSError:
        own = ""
    parts = [part for part in own.split("/") if part not in ("", "..")]
    return [CGROUP.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _left(group: Path) -> Available | None:
    """Of a control group's limit; None where it has none."""
    try:
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return Available(most - used + int(stat["inactive_file"]), most)
    except (OSError, ValueError, KeyError):
        return None


class Pressure:
    """Frames of a chunk: ``most``, halved at each look that finds less than LOW free, doubled at each that finds ENOUGH.

    group: frames that the tower merges; all numbers are multiples of it, as ``most`` is.

    ``short``: from the first such look until all are back. notify: is told each time there are fewer, and when all are back.
    """

    def __init__(
        self,
        most: int,
        notify: Notify,
        read: Callable[[], Available] = available,
        clock: Callable[[], float] = time.monotonic,
        group: int = 1,
    ) -> None:
        self.most = self.frames = most
        self.group = group
        self._notify, self._read, self._clock = notify, read, clock
        self.short = False
        self._next = clock()

    def look(self) -> int:
        """Frames of the chunk that begins now."""
        if self._clock() < self._next:
            return self.frames
        self._next = self._clock() + INTERVAL
        memory = self._read()
        before = self.frames
        if memory.free < LOW * memory.total:
            self.frames, self.short = max(1, before // self.group // 2) * self.group, True
        elif memory.free > ENOUGH * memory.total:
            self.frames = min(self.most, 2 * before)
            self.short = self.frames < self.most
        with suppress(OSError):  # a terminal that went away is no reason to stop
            self._say(before, memory)
        return self.frames

    def _say(self, before: int, memory: Available) -> None:
        if self.frames < before:
            left = f"{memory.free / 1e6:,.0f} of {memory.total / 1e6:,.0f} MB are left"
            self._notify(f"memory is short ({left}): frames are taken in {self.frames} at a time, not {before}")
        elif before < self.frames == self.most:
            self._notify(f"there is enough memory again: frames are taken in {self.most} at a time")
