"""Files of JSON lines that only grow: a journal of finished work, the results of benchmarks."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any


def read_lines(path: Path, *, finite: bool = False) -> list[Any]:
    """The values of a file's lines, empty ones aside. A last line that a kill cut short counts as not written.

    Raises OSError, and ValueError naming the line that is not JSON; with ``finite`` NaN and infinities are not.
    """
    strict: Any = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    found, raw = [], path.read_bytes()
    for number, text in enumerate(raw.split(b"\n"), start=1):
        try:
            if text.strip():
                found.append(json.loads(text, **strict))
        except (ValueError, RecursionError):
            if number <= raw.count(b"\n"):
                raise ValueError(f"line {number}: is not JSON") from None
    return found


class LineWriter:
    """Appends values to a file of JSON lines, each on its way to the disk when :meth:`append` returns.

    ``sync``: each is on the disk then. Raises OSError where the file cannot be written, and with ``exclusive`` BlockingIOError
    where another process is writing it.
    """

    def __init__(self, path: Path, *, sync: bool = False, exclusive: bool = False) -> None:
        self._file, self._sync = open(path, "a+b"), sync  # noqa: SIM115
        try:
            if exclusive:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raw = path.read_bytes()
            if raw and not raw.endswith(b"\n"):
                os.truncate(path, raw.rfind(b"\n") + 1)
        except OSError:
            self._file.close()
            raise

    def append(self, value: Any) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value
