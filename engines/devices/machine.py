"""Read the machine's files and packages, and run its commands, for the checks of ``edgevlm doctor``."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

LIMIT_S = 10.0  # a probe's time limit in seconds
T = TypeVar("T")


Status = Literal["ok", "warn", "fail"]
Outcome = tuple[Status, str] | tuple[Status, str, str]  # a check's status, its finding, and how to fix the problem


def installed() -> dict[str, str]:
    """Return the versions of all installed packages, by lower-case name."""
    return {str(found.metadata["Name"]).lower(): found.version for found in metadata.distributions() if found.metadata["Name"]}


def run(command: Sequence[str], limit_s: float = LIMIT_S) -> str | None:
    """Return a command's output, or None if the command is missing, fails, or takes longer than ``limit_s`` seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to inspect. ``root``: the folder that paths start from. ``packages()``: returns each installed package's
    version.
    """

    root: Path = Path("/")
    packages: Callable[[], Mapping[str, str]] = installed
    run: Callable[[Sequence[str]], str | None] = field(default=run)
    limit_s: float = LIMIT_S

    def path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> str | None:
        """Return a file's text without blanks and zero bytes at its end, or None if the file cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").rstrip("\0 \n")
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        place = self.path(folder)
        return sorted(path.name for path in place.iterdir()) if place.is_dir() else []

    def number(self, name: str) -> int | None:
        """Return the integer in a file, or None if the file is missing or holds anything else."""
        text = self.read(name)
        return int(text) if text is not None and text.strip().isdigit() else None

    def fields(self, name: str) -> dict[str, str]:
        """Return a file's ``key: value`` lines as a dict, empty for a missing file."""
        found: dict[str, str] = {}
        for line in (self.read(name) or "").splitlines():
            key, parted, value = line.partition(":")
            if parted:
                found.setdefault(key.strip(), value.strip())
        return found

    def within(self, call: Callable[[], T]) -> T | None:
        """Call a function and return its result, or None if it takes longer than the time limit. Errors raised by the function
        are passed on.
        """
        found: Future[T] = Future()

        def work() -> None:
            try:
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=work, name="probe", daemon=True).start()
        return found.result() if wait([found], self.limit_s).done else None
