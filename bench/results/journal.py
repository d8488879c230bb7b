"""The file of results: lines of JSON, appended and never overwritten.

A run's header is ``{"event": "run", "id", "at", "quick", "versions", "machine"}``. A command of it is ``{"event": "begin",
"run", "entry", "command", "at"}``, its own lines with ``run`` and ``entry`` before them, and ``{"event": "end", .. "seconds"}``
or ``{"event": "failed", .. "code", "error"}``. A command that begins again in the same run takes the place of what it said
before. Lines of a bench that no ``bench all`` wrote are a run without a header, of that file's name.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from edgevlm.errors import UserError

NAME = "results.jsonl"
Line = dict[str, Any]


@dataclass(slots=True)
class Entry:
    """One command of a run. lines: what it printed, without ``run`` and ``entry``. seconds: None until it has ended well."""

    name: str
    command: str = ""
    at: str = ""
    lines: list[Line] = field(default_factory=list)
    seconds: float | None = None
    error: str | None = None


@dataclass(slots=True)
class Run:
    """``header`` is empty where lines come without one."""

    id: str
    header: Line = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        """Of all commands."""
        return [line for entry in self.entries.values() for line in entry.lines]

    def section(self, name: str) -> Line:
        """``machine`` or ``versions`` of the header; empty where it has none."""
        found = self.header.get(name)
        return found if isinstance(found, dict) else {}

    def journal(self) -> Iterator[Line]:
        """Lines that are this run when they are read; commands that began again are there once."""
        if self.header:
            yield self.header
        for entry in self.entries.values():
            place = {"run": self.id, "entry": entry.name}
            if entry.command:
                yield {"event": "begin", **place, "command": entry.command, "at": entry.at}
            yield from ({**place, **line} for line in entry.lines)
            if entry.error is not None:
                yield {"event": "failed", **place, "error": entry.error}
            if entry.seconds is not None:
                yield {"event": "end", **place, "seconds": entry.seconds}

    def take(self, line: Line) -> None:
        """One line of this run but its header."""
        name, event = str(line.get("entry", line.get("bench", "?"))), line.get("event")
        if event == "begin":
            self.entries.pop(name, None)
            self.entries[name] = Entry(name, str(line.get("command", "")), str(line.get("at", "")))
            return
        entry = self.entries.setdefault(name, Entry(name))
        if event == "end":
            entry.seconds = number(line, "seconds")
        elif event == "failed":
            entry.error = str(line.get("error", ""))
        elif "bench" in line:
            entry.lines.append({key: value for key, value in line.items() if key not in ("run", "entry")})


def number(line: Line, key: str) -> float | None:
    """A finite number; None for whatever else stands there."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if abs(value) < 1e300 else None


def read_runs(places: Sequence[str | Path]) -> list[Run]:
    """The runs of files, or of folders with results.jsonl, in their order. ``PLACE#ID`` is one run.

    Raises UserError for what is not there, is not lines of JSON, or has no run of that id.
    """
    runs = list[Run]()
    for place in places:
        path, _, wanted = (str(place), "", "") if Path(place).exists() else str(place).rpartition("#")
        found = runs_of(lines_of(Path(path or wanted)), Path(path or wanted).name)
        if path and wanted:
            chosen = [run for run in found if run.id == wanted]
            if not chosen:
                raise UserError(f"{path}: has no run {wanted}; it has {', '.join(run.id for run in found) or 'none'}")
            found = chosen
        runs += found
    return runs


def runs_of(lines: Iterable[Line], name: str) -> list[Run]:
    """Lines sorted into runs; ``name``: of the run that lines without one are."""
    runs: dict[str, Run] = {}
    for line in lines:
        key = str(line.get("id" if line.get("event") == "run" else "run", name))
        run = runs.setdefault(key, Run(key))
        if line.get("event") == "run":
            run.header = line
        else:
            run.take(line)
    return list(runs.values())


def lines_of(place: Path) -> Iterator[Line]:
    """Objects of a file, or of results.jsonl in a folder. A last line without its end was torn and is left out."""
    path = place / NAME if place.is_dir() else place
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); edgevlm bench all --out DIR writes one") from None
    for count, text in enumerate(raw.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            if raw.endswith(b"\n") or count <= raw.count(b"\n"):
                raise UserError(f"{path}, line {count}: is not JSON; give files that edgevlm bench wrote") from None
            return
        if not isinstance(line, dict):
            raise UserError(f"{path}, line {count}: is not an object; give files that edgevlm bench wrote")
        yield line


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


class Journal:
    """DIR/results.jsonl open for appending, by one process at a time. Raises UserError where it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(f"{self.path}: another bench all is writing there; wait for it, or give another --out") from None
        self._end_torn_line()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, line: Line) -> None:
        """One line, on its way to the disk when this returns."""
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); what is there stays") from None

    def _end_torn_line(self) -> None:
        """Take off a last line that a killed process did not finish."""
        raw = self.path.read_bytes()
        if raw and not raw.endswith(b"\n"):
            os.truncate(self.path, raw.rfind(b"\n") + 1)
