"""The machine that checks inspect, replaceable in tests: files below a root, packages, probes with a time limit."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

LIMIT_S = 10.0  # of one probe
T = TypeVar("T")


Status = Literal["ok", "warn", "fail"]
Outcome = tuple[Status, str] | tuple[Status, str, str]  # of a check: its status, what was found, and how to fix it


def installed() -> dict[str, str]:
    """Return the version of every installed distribution, by its name in lower case."""
    return {str(found.metadata["Name"]).lower(): found.version for found in metadata.distributions() if found.metadata["Name"]}


def run(command: Sequence[str], limit_s: float = LIMIT_S) -> str | None:
    """Return what a command prints; None if it is not there, fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to inspect. ``root`` replaces / in paths; ``packages`` and ``run`` give facts that are in no file."""

    root: Path = Path("/")
    packages: Callable[[], Mapping[str, str]] = installed
    run: Callable[[Sequence[str]], str | None] = field(default=run)
    limit_s: float = LIMIT_S

    def path(self, name: str) -> Path:
        """Return a path of the machine, ``name`` without the leading slash."""
        return self.root / name

    def read(self, name: str) -> str | None:
        """Return a small file's text without trailing blanks and zero bytes; None if it is not there or may not be read."""
        try:
            return self.path(name).read_text(errors="replace").rstrip("\0 \n")
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; none if it is not there."""
        place = self.path(folder)
        return sorted(path.name for path in place.iterdir()) if place.is_dir() else []

    def number(self, name: str) -> int | None:
        """Return a file that holds one integer."""
        text = self.read(name)
        return int(text) if text is not None and text.strip().isdigit() else None

    def fields(self, name: str) -> dict[str, str]:
        """Return ``key: value`` lines, the first of each key; empty for a file that is not there."""
        found: dict[str, str] = {}
        for line in (self.read(name) or "").splitlines():
            key, parted, value = line.partition(":")
            if parted:
                found.setdefault(key.strip(), value.strip())
        return found

    def within(self, call: Callable[[], T]) -> T | None:
        """Return what ``call`` returns, or None if it exceeds the time limit; the call is then abandoned. Raises its errors."""
        found: Future[T] = Future()

        def work() -> None:
            try:
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=work, name="probe", daemon=True).start()
        return found.result() if wait([found], self.limit_s).done else None
