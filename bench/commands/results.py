"""``edgevlm bench all`` and ``report``: run the benchmarks, keep their results, and show them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json, flag, option
from edgevlm.errors import UserError
from edgevlm.progress import to_stderr

Baseline = Annotated[str | None, option("FILE[#ID]", "Compare with this earlier run.")]
FailOver = Annotated[str, option("N%", "Exit with status 1 where slower by more.")]
Force = Annotated[bool, flag("--force", "Compare runs of different machines.")]


def all_benches(
    out: Annotated[Path | None, option("DIR", "Append to DIR/results.jsonl.", "needed")] = None,
    quick: Annotated[bool, flag("--quick", "Run short commands, mostly of the demo.")] = False,
    only: Annotated[str | None, option("NAME,...", "Run only these of the plan.")] = None,
    also: Annotated[list[str] | None, option("COMMAND", "Run one more: 'speed decode --model CHECKPOINT'.")] = None,
    new: Annotated[bool, flag("--new", "Start another run instead of continuing the last.")] = False,
    plan: Annotated[bool, flag("--plan", "Print the commands and run none.")] = False,
) -> None:
    """Run the benchmarks and keep their results.

    The same command continues where it was stopped. Failures are recorded, the rest goes on, and the exit status is 1.
    """
    from edgevlm.bench.results.run_all import planned, run_all
    from edgevlm.progress import progress

    entries = planned(quick, only, also or [])
    if plan:
        for entry in entries:
            typer.echo(entry.command)
        return
    if out is None:
        raise UserError("give --out DIR, where results are kept; --plan prints what would run")
    try:
        with progress("reading the results") as step:
            what_runs = step if sys.stderr.isatty() else to_stderr
            run = run_all(out, entries, step.print, what_runs, quick=quick, new=new)
    except KeyboardInterrupt:
        to_stderr(f"stopped; what is done is in {out}, and the same command continues")
        raise
    asked = {entry.command for entry in entries}
    ran = [one for one in run.entries.values() if one.command in asked]
    failed = [one for one in ran if one.error is not None]
    typer.echo(f"run {run.id}: {sum(one.seconds is not None for one in ran)} commands done, {len(failed)} failed")
    for one in failed:
        typer.echo(f"failed: {one.command}: {one.error}")
    if failed:
        raise typer.Exit(1)


def report(
    results: Annotated[list[str] | None, typer.Argument(metavar="DIR|FILE[#ID]...", show_default=False)] = None,
    out: Annotated[Path | None, option("FILE.html", "Write a page of tables.")] = None,
    baseline: Baseline = None,
    fail_over: FailOver = "20%",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Report results as a page, or compare runs.

    With --baseline the last run of the results is compared line by line; the exit status is 1 where it is slower by more than
    --fail-over and not by chance: beyond the spreads, or at least twice as slow where a line has none.
    """
    from edgevlm.bench.results.compare import compare, parse_margin
    from edgevlm.bench.results.journal import last_run, read_runs

    if not results or (out is None and baseline is None):
        raise UserError("give results and where they go: edgevlm bench report DIR --out report.html")
    runs, margin = read_runs(results), parse_margin(fail_over)
    if not runs:
        raise UserError(f"{', '.join(results)}: no results yet; edgevlm bench all --out DIR makes some")
    earlier = None if baseline is None else last_run(baseline)
    if out is not None:
        from edgevlm.bench.results.report import write

        write(out, runs, [] if earlier is None else compare(runs[-1], earlier, margin, force=force))
        to_stderr(f"wrote {out}: {len(runs)} runs, {sum(len(run.lines) for run in runs)} lines")
    if earlier is not None and _compare(runs[-1], earlier, margin, force, as_json):
        raise typer.Exit(1)


def _compare(new: Any, old: Any, margin: float, force: bool, as_json: bool) -> bool:
    """Print what changed from ``old`` to ``new``; whether anything is worse."""
    from edgevlm.bench.results.compare import any_worse, compare

    changes = compare(new, old, margin, force=force)
    _print(changes, as_json)
    if unsure := sum(change["verdict"] == "no spread" for change in changes):
        to_stderr(f"{unsure} slower by more than {margin:.0%}, measured once: cannot be told from chance; measure again")
    return any_worse(changes)


def _print(lines: Iterable[dict[str, Any]], as_json: bool) -> None:
    from edgevlm.bench.output import Table

    table = Table(as_json)
    for line in lines:
        table.print(line)
