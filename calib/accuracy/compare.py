"""Compare every variant at every budget on the same streams and questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.calib.accuracy.oracle import ORACLES
from edgevlm.calib.accuracy.pools import in_processes
from edgevlm.calib.accuracy.text_streams import TEXT_FACTS
from edgevlm.calib.accuracy.variants import ORACLE, Budget, Record, SkippedRun, Variant, VariantRun, key_of
from edgevlm.calib.accuracy.worker import AccuracySettings, CaseTask, Worker
from edgevlm.calib.intervals import Estimate, fraction_right
from edgevlm.progress import Report
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.files import JsonLines
from edgevlm.runtime.model import Model
from edgevlm.runtime.settings import ALL

ENTERS = 0.9  # a kind of question is scored only if full KV gets at least this fraction right

Pick = Callable[[dict[str, Any]], bool]  # returns whether to count a question's result


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of a comparison. ``records``: the records of each run, one per stream.

    ``runs``: first the run that shows what can be answered at all (usually ``full``), then the other runs, budget by budget.
    """

    settings: AccuracySettings
    runs: list[VariantRun]
    skipped: list[SkippedRun]
    records: dict[VariantRun, list[Record]]

    @property
    def enters(self) -> float:
        """Return the lowest first-run accuracy at which a kind of question is scored."""
        return 0.0 if self.settings.suite == TEXT_FACTS else ENTERS

    def kinds(self) -> dict[str, Estimate]:
        """Return the first run's accuracy on each kind of question."""
        records = self.records[self.runs[0]]
        names = dict.fromkeys(result["kind"] for record in records for result in record["results"])
        return {name: fraction_right(clusters(records, partial(_is_of, name))) for name in names}


def compare(
    settings: AccuracySettings, variants: Sequence[Variant], budgets: Sequence[Budget], streams: int, *,
    out: Path | None = None, resume: bool = False, workers: int = 1, progress: Report = lambda *what: None,
    model: Model | None = None, append: Sequence[str] = (ALL,), encode: Sequence[str] = (ALL,),
) -> Comparison:  # fmt: skip
    """Run every variant on every stream; with ``resume``, skip the runs whose results are in the journal ``out``.

    ``model``: a loaded model for this process; worker processes load their own. Each variant runs with every combination of
    ``append`` and ``encode``. Raises UserError.
    """
    worker = Worker(settings, model)
    ceiling = worker.ceiling()
    known = {"edgevlm": __version__, **asdict(settings), "model": worker.identity, "kinds": worker.kinds}
    if settings.engine == DEFAULT_ENGINE:  # journals written before ``--engine`` existed stay valid
        del known["engine"]
    with JsonLines(out, {"journal": "edgevlm bench accuracy", **known}, key_of, resume=resume) as journal:
        full = [replace(ceiling, label=Variant(ceiling.label).under(*ways).label) for ways in product(append, encode)]
        found: list[VariantRun | SkippedRun] = list(dict.fromkeys([ceiling, *full]))
        for number, budget in enumerate(budgets):
            progress("budgets of equal bytes", number, len(budgets))
            rows = product(expand(variants, settings.suite), append, encode)
            found += worker.runs([row.under(*ways) for row, *ways in rows], budget)
        runs = [run for run in found if isinstance(run, VariantRun)]
        tasks = [CaseTask(run, stream) for stream in range(streams) for run in runs]
        todo = [task for task in tasks if (task.run.label, task.run.budget, task.stream) not in journal.records]
        for number, record in enumerate(in_processes(workers, worker, partial(Worker, settings), todo), 1):
            journal.add(record)
            progress("streams", len(tasks) - len(todo) + number, len(tasks))
    of = journal.records
    records = {run: [of[run.label, run.budget, stream] for stream in range(streams)] for run in runs}
    return Comparison(settings, runs, [skip for skip in found if isinstance(skip, SkippedRun)], records)


def expand(variants: Sequence[Variant], suite: str) -> list[Variant]:
    """Replace ``oracle`` with the names of all oracles. On text-facts, the oracles hardly differ, so only one is used."""
    oracles = [Variant(f"{ORACLE}/{name}") for name in (("spread",) if suite == TEXT_FACTS else ORACLES)]
    return [row for variant in variants for row in (oracles if variant.label == ORACLE else [variant])]


def clusters(records: Sequence[Record], pick: Pick) -> list[list[bool]]:
    """Return whether each result that ``pick`` selects is correct, as one list per stream."""
    return [[result["right"] for result in record["results"] if pick(result)] for record in records]


def _is_of(kind: str, result: dict[str, Any]) -> bool:
    return result["kind"] == kind
