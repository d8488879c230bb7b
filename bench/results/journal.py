"""Read the file in which ``bench all`` saves results, one JSON object per line.

A run's header line has the event ``run``. Each command then adds a line with the event ``begin``, its result lines with ``run``
and ``entry``, and a last line with ``end`` or ``failed``. If a command begins again in the same run, its earlier lines no
longer count. Lines without a run id, such as one command's output, form one run named after the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgevlm.bench.output import Line
from edgevlm.errors import UserError
from edgevlm.runtime.files import read_lines

NAME = "results.jsonl"


@dataclass(slots=True)
class Entry:
    """One command's results, without the fields ``run``, ``entry`` and ``schema``. ``seconds``: None until the command
    succeeds.
    """

    name: str
    command: str = ""
    at: str = ""
    lines: list[Line] = field(default_factory=list)
    seconds: float | None = None
    error: str | None = None


@dataclass(slots=True)
class Run:
    """The results of one ``bench all``. ``header``: the run's header line, empty if the file has none."""

    id: str
    header: Line = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        return [line for entry in self.entries.values() for line in entry.lines]

    def section(self, name: str) -> Line:
        """Return a part of the header, ``machine`` or ``versions``, or an empty dict if it is missing."""
        found = self.header.get(name)
        return found if isinstance(found, dict) else {}

    def take(self, line: Line) -> None:
        name, event = str(line.get("entry", line.get("bench", "?"))), line.get("event")
        if event == "begin":
            self.entries.pop(name, None)
        entry = self.entries.setdefault(name, Entry(name, str(line.get("command", "")), str(line.get("at", ""))))
        if event == "end":
            entry.seconds = number(line, "seconds")
        elif event == "failed":
            entry.error = str(line.get("error", ""))
        elif "bench" in line:
            entry.lines.append({key: value for key, value in line.items() if key not in ("run", "entry", "schema")})


def number(line: Line, key: str) -> float | None:
    """Return a line's value for ``key`` if it is a finite number, otherwise None."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300 or math.isnan(value):
        return None
    return float(value)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in files, in order; for a directory, those in its results.jsonl. ``PATH#ID`` names a single run.

    Raises UserError for a path that cannot be read, does not hold JSON lines, or has no run with the id.
    """
    runs = list[Run]()
    for given in map(str, paths):
        name, _, wanted = (given, "", "") if Path(given).exists() or "#" not in given else given.rpartition("#")
        found = runs_of(lines_of(Path(name)), Path(name).name)
        if wanted and not any(run.id == wanted for run in found):
            raise UserError(f"{given}: run {wanted} not found; choose from {', '.join(run.id for run in found) or 'none'}")
        runs += [run for run in found if wanted in ("", run.id)]
    return runs


def runs_of(lines: Iterable[Line], name: str) -> list[Run]:
    """Group lines into runs. Lines without a run id form a run called ``name``."""
    runs: dict[str, Run] = {}
    for line in lines:
        is_header = line.get("event") == "run"
        key = str(line.get("id" if is_header else "run", name))
        run = runs.setdefault(key, Run(key))
        if is_header:
            run.header = line
        else:
            run.take(line)
    return list(runs.values())


def lines_of(path: Path) -> list[Line]:
    """Return the JSON objects in a file, or in a directory's results.jsonl. Raises UserError."""
    path = path / NAME if path.is_dir() else path
    try:
        found = read_lines(path, finite=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); create one with edgevlm bench all --out DIR") from None
    except ValueError as error:
        raise UserError(f"{path}, {error}; use files written by edgevlm bench") from None
    if not all(isinstance(line, dict) for line in found):
        raise UserError(f"{path}: has a line that is not an object; use files written by edgevlm bench")
    return found
