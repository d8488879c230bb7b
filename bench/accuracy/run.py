"""A run of the suite: every policy at every budget on the same streams and questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from edgevlm import __version__
from edgevlm.bench.accuracy.cells import Cell, Skipped
from edgevlm.bench.accuracy.desk import Desk, Settings, Task, perform_all
from edgevlm.bench.accuracy.entries import ORACLE, Budget, Entry
from edgevlm.bench.accuracy.oracle import ORACLES
from edgevlm.calib.demo.questions import OFFERED
from edgevlm.calib.journal import Journal, Record
from edgevlm.runtime.model import Model

Progress = Callable[[str, int, int], None]  # what is being done, how many are, of how many


@dataclass(frozen=True, slots=True)
class Outcome:
    """cells: the ceiling first, ``full`` as a rule, then by budget; records: of each cell, stream by stream."""

    settings: Settings
    cells: list[Cell]
    skipped: list[Skipped]
    records: dict[Cell, list[Record]]


def compare(
    settings: Settings,
    entries: Sequence[Entry],
    budgets: Sequence[Budget],
    streams: int,
    *,
    out: Path | None = None,
    resume: bool = False,
    workers: int = 1,
    progress: Progress = lambda what, done, total: None,
    model: Model | None = None,
) -> Outcome:
    """Sit every exam, or with ``out`` and ``resume`` those that the journal does not have yet. Raises UserError.

    model: one that is loaded already, for one worker.
    """
    desk = Desk(settings, model)
    ceiling = desk.ceiling()
    header = {"edgevlm": __version__, **asdict(settings), "model": desk.identity, "kinds": list(OFFERED)}
    with Journal(out, header, resume) as journal:
        found: list[Cell | Skipped] = [ceiling]
        for number, budget in enumerate(budgets):
            progress("budgets of equal bytes", number, len(budgets))
            found += desk.cells(expand(entries), budget)
        cells = [cell for cell in found if isinstance(cell, Cell)]
        skipped = [skip for skip in found if isinstance(skip, Skipped)]
        tasks = [Task(cell, stream) for stream in range(streams) for cell in cells]
        todo = [task for task in tasks if (task.cell.label, task.cell.budget, task.stream) not in journal.records]
        progress("streams", len(tasks) - len(todo), len(tasks))
        for number, record in enumerate(perform_all(desk, todo, workers)):
            journal.add(record)
            progress("streams", len(tasks) - len(todo) + number + 1, len(tasks))
        of = journal.records
        records = {cell: [of[cell.label, cell.budget, stream] for stream in range(streams)] for cell in cells}
    return Outcome(settings, cells, skipped, records)


def expand(entries: Sequence[Entry]) -> list[Entry]:
    """``oracle`` is a row for each of the oracles, of which the report names the best."""
    oracles = [Entry(f"{ORACLE}/{name}") for name in ORACLES]
    return [row for entry in entries for row in (oracles if entry.label == ORACLE else [entry])]
