"""``edgevlm bench all`` and ``report``: run the benchmarks, save their results, and report them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, flag, option
from edgevlm.errors import UserError
from edgevlm.progress import to_stderr


def all_benches(
    out: Annotated[Path | None, option("DIR", "Append to DIR/results.jsonl.", "needed")] = None,
    quick: Annotated[bool, flag("--quick", "Run short commands, mostly on the demo.")] = False,
    only: Annotated[str | None, option("NAME,...", "Run only these commands of the plan.")] = None,
    plan: Annotated[bool, flag("--plan", "Print the commands and run none.")] = False,
) -> None:
    """Run the benchmarks and save their results.

    Repeat the command to continue an interrupted run. After a failure, the other benchmarks still run, and the exit status is
    1.
    """
    from edgevlm.bench.results.run_all import planned, run_all, typed

    entries = planned(quick, only)
    if plan:
        typer.echo("\n".join(map(typed, entries.values())))
        return
    if out is None:
        raise UserError("the results folder is missing; add --out DIR, or --plan to print the commands")
    try:
        run = run_all(out, entries, to_stderr, quick=quick)
    except KeyboardInterrupt:
        to_stderr(f"stopped; run the same command to continue ({out})")
        raise
    ran = [run.entries[name] for name in entries]
    failed = [one for one in ran if one.error is not None]
    typer.echo(f"run {run.id}: {len(ran) - len(failed)} commands done, {len(failed)} failed")
    for one in failed:
        typer.echo(f"failed: {one.command}: {one.error}")
    if failed:
        raise typer.Exit(1)


def report(
    results: Annotated[list[str] | None, typer.Argument(metavar="DIR|FILE[#ID]...", show_default=False)] = None,
    out: Annotated[Path | None, option("FILE.html", "Write a page of tables.")] = None,
    baseline: Annotated[str | None, option("FILE[#ID]", "Compare with this earlier run.")] = None,
    fail_over: Annotated[str, option("N%", "Exit with status 1 if a line is slower by more than this.")] = "20%",
    force: Annotated[bool, flag("--force", "Compare runs of different machines.")] = False,
    as_json: Json = False,
) -> None:
    """Report results as a page, or compare runs.

    With --baseline, the last run is compared line by line with the earlier run. The exit status is 1 if a line is slower by
    more than --fail-over, unless chance can explain the difference.
    """
    from edgevlm.bench.output import Table
    from edgevlm.bench.results.compare import compare
    from edgevlm.bench.results.journal import read_runs
    from edgevlm.bench.results.report import page

    if not results or (out is None and baseline is None):
        raise UserError("results or their destination are missing; run edgevlm bench report DIR --out report.html")
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*%\s*", fail_over):
        raise UserError(f"--fail-over {fail_over!r}: give a percentage, such as 20%")
    runs, margin = read_runs(results), float(fail_over.strip(" %")) / 100
    if not runs:
        raise UserError(f"{', '.join(results)}: no results yet; run edgevlm bench all --out DIR")
    changes = []
    if baseline is not None:
        if not (earlier := read_runs([baseline])):
            raise UserError(f"{baseline}: has no results")
        changes = compare(runs[-1], earlier[-1], margin, force=force)
    if out is not None:
        try:
            out.write_text(page(runs, changes), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
        to_stderr(f"wrote {out}: {len(runs)} runs, {sum(len(run.lines) for run in runs)} lines")
    Table(as_json).print_all(changes)
    if unsure := sum(change["verdict"] == "no spread" for change in changes):
        to_stderr(f"{unsure} slower by more than {margin:.0%}, but measured once, so perhaps by chance; measure again")
    if any(change["verdict"] == "worse" for change in changes):
        raise typer.Exit(1)
