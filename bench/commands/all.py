"""``edgevlm bench all``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgevlm.bench.results.typed import Baseline, FailOver, Force
from edgevlm.errors import UserError


def all(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Append to DIR/results.jsonl.")],
    quick: Annotated[bool, typer.Option("--quick", help="Short commands, of the demo alone but for compression.")] = False,
    only: Annotated[str | None, typer.Option(metavar="NAME,...", help="Benches or entries of the plan.")] = None,
    also: Annotated[list[str] | None, typer.Option(metavar="COMMAND", help="One more: 'decode --model CHECKPOINT'.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Begin another run rather than go on with the last.")] = False,
    run_id: Annotated[str | None, typer.Option("--id", metavar="ID", help="The run to go on with.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the commands, and run none.")] = False,
    baseline: Baseline = None,
    fail_over: FailOver = "20%",
    force: Force = False,
) -> None:
    """Run the benches one after the other and keep their lines, with what they were measured on.

    The same command goes on where it was stopped. One that fails is noted, and the others go on; then the exit code is 1.
    """
    from edgevlm.bench.results.baseline import compared, last_run
    from edgevlm.bench.results.compare import margin_of
    from edgevlm.bench.results.everything import duration, run_all
    from edgevlm.bench.results.plan import planned

    margin_of(fail_over)
    if new and run_id is not None:
        raise UserError("--new begins a run and --id goes on with one: give one of them")
    entries = planned(quick, only, also or [])
    if plan:
        for entry in entries:
            typer.echo(f"{entry.command}   # {duration(entry.seconds)}")
        return
    if baseline is not None:
        last_run(baseline)
    try:
        run = run_all(out, entries, lambda what: typer.echo(what, err=True), quick=quick, wanted=run_id, new=new)
    except KeyboardInterrupt:
        typer.echo(f"stopped; what is done is in {out}, and the same command goes on", err=True)
        raise
    asked = {entry.command for entry in entries}
    ran = [one for one in run.entries.values() if one.command in asked]
    failed = [one for one in ran if one.error is not None]
    typer.echo(f"run {run.id}: {sum(one.seconds is not None for one in ran)} commands done, {len(failed)} failed")
    for one in failed:
        typer.echo(f"failed: {one.command}: {one.error}")
    worse = baseline is not None and compared(f"{out}#{run.id}", baseline, fail_over, force, as_json=False)
    if failed or worse:
        raise typer.Exit(1)
