"""``edgevlm bench all``: a plan's commands one after the other, each in a process of its own, its lines kept as they come."""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from edgevlm.bench.results import environment
from edgevlm.bench.results.journal import Journal, Line, Run, lines_of, runs_of
from edgevlm.bench.results.plan import Planned
from edgevlm.engines.devices.machine import Machine
from edgevlm.errors import UserError

PROGRAM = [sys.executable, "-m", "edgevlm", "bench"]
PATIENCE_S = 10.0  # for a process that was asked to end
Note = Callable[[str], object]


def run_all(
    folder: Path, plan: Sequence[Planned], note: Note, *, quick: bool, wanted: str | None = None, new: bool = False,
    machine: Machine | None = None,
) -> Run:  # fmt: skip
    """Run what of the plan the run has not; returns the run, its results read back.

    wanted: the run to go on with; else, unless ``new``, the last of the same kind in the folder. A command that fails is a line
    with its error, and the rest go on. Raises UserError for a run that is not there, or that was of another machine or version.
    """
    with Journal(folder) as journal:
        header = {"versions": environment.versions(machine or Machine()), "machine": environment.describe(machine or Machine())}
        run = None if new else _earlier(list(runs_of(lines_of(journal.path), "")), quick, wanted)
        if run is None:
            run = Run(_new_id(), {"event": "run", "id": "", "at": _now(), "quick": quick, **header})
            run.header["id"] = run.id
            journal.append(run.header)
        else:
            _check_same(run, header)
        done = {entry.command for entry in run.entries.values() if entry.seconds is not None}
        left = [entry for entry in plan if entry.command not in done]
        note(f"run {run.id}: {len(left)} of {len(plan)} commands to do; results in {journal.path}")
        _go(run, left, journal, note)
        return next(found for found in runs_of(lines_of(journal.path), "") if found.id == run.id)


def _go(run: Run, left: Sequence[Planned], journal: Journal, note: Note) -> None:
    expected = spent = 0.0
    for number, entry in enumerate(left, start=1):
        pace = spent / expected if expected else 1.0
        rest = pace * sum(other.seconds for other in left[number - 1 :])
        note(f"[{number}/{len(left)}] {entry.command}   (about {duration(rest)} left)")
        place = {"run": run.id, "entry": entry.name}
        journal.append({"event": "begin", **place, "command": entry.command, "at": _now()})
        begun = time.monotonic()
        code, error = _process(entry, lambda line, place=place: journal.append({**place, **line}), note)  # type: ignore[misc]
        took = time.monotonic() - begun
        if code:
            note(f"[{number}/{len(left)}] failed: {error}")
            journal.append({"event": "failed", **place, "code": code, "error": error})
        else:
            journal.append({"event": "end", **place, "seconds": round(took, 1)})
        spent, expected = spent + took, expected + entry.seconds


def _process(entry: Planned, keep: Callable[[Line], object], note: Note) -> tuple[int, str]:
    """Its exit code and the last line of its stderr. Lines of its stdout that are objects are kept, at once."""
    said = [""]
    with subprocess.Popen(
        [*PROGRAM, *entry.arguments, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, errors="backslashreplace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=_pass_on, args=(process.stderr, said, note), daemon=True)
        reader.start()
        try:
            for text in process.stdout:
                line = _object(text)
                if line is not None:
                    keep(line)
            process.wait()
        finally:
            _end(process)
        reader.join()
    return process.returncode, said[-1] or f"its process ended with code {process.returncode}"


def _pass_on(stream: IO[str], said: list[str], note: Note) -> None:
    with closing(stream):
        for text in stream:
            if text.strip():
                said[-1] = text.strip()
                note(f"    {said[-1]}")


def _object(text: str) -> Line | None:
    try:
        line = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _finite(text: str) -> float | None:
    """A number, None for one beyond all numbers: no line of JSON can say it."""
    value = float(text)
    return value if math.isfinite(value) else None


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _earlier(runs: Sequence[Run], quick: bool, wanted: str | None) -> Run | None:
    if wanted is None:
        return next((run for run in reversed(runs) if run.header.get("quick") == quick), None)
    found = next((run for run in runs if run.id == wanted and run.header), None)
    if found is None:
        raise UserError(f"--id {wanted}: there is no such run; there is {', '.join(run.id for run in runs) or 'none'}")
    return found


def _check_same(run: Run, header: Line) -> None:
    """Refuse to add to a run what was measured with something else."""
    before, now = run.section("versions"), header["versions"]
    changed = [
        f"{name} {before.get(name)} and {now.get(name)}" for name in {**before, **now} if before.get(name) != now.get(name)
    ]
    apart = environment.difference(run.section("machine"), header["machine"]) or ", ".join(changed)
    if apart:
        raise UserError(f"run {run.id} was measured with something else ({apart}): begin another with --new")


def duration(seconds: float) -> str:
    """``40 s``, ``5 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _new_id() -> str:
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
