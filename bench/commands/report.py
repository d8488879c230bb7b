"""``edgevlm bench report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.bench.results.typed import Baseline, FailOver, Force
from edgevlm.errors import UserError


def report(
    results: Annotated[list[str] | None, typer.Argument(metavar="DIR|FILE[#ID]...", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the page there.")] = None,
    readme: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Make its tables between bench marks anew.")] = None,
    extract: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Print the JSON lines inside a page.")] = None,
    baseline: Baseline = None,
    fail_over: FailOver = "20%",
    force: Force = False,
) -> None:
    """Make one HTML page of results: charts, tables, machines, versions, commands, and the JSON itself."""
    from edgevlm.bench.report import page
    from edgevlm.bench.results.baseline import last_run
    from edgevlm.bench.results.compare import compare, margin_of
    from edgevlm.bench.results.journal import read_runs
    from edgevlm.bench.results.readme import rewrite

    if extract is not None:
        for line in page.extract(extract):
            typer.echo(json.dumps(line))
        return
    if not results or (out is None and readme is None):
        raise UserError("give results and where they go: edgevlm bench report DIR --out report.html, or --readme README.md")
    runs, margin = read_runs(results), margin_of(fail_over)
    if not runs:
        raise UserError(f"{', '.join(results)}: no results yet; edgevlm bench all --out DIR makes some")
    comparison = None if baseline is None else compare(runs[-1], last_run(baseline), force=force)
    if out is not None:
        page.write(out, runs, comparison, margin)
        typer.echo(f"wrote {out}: {len(runs)} runs, {sum(len(run.lines) for run in runs)} lines", err=True)
    if readme is not None:
        typer.echo(f"{readme}: {', '.join(rewrite(readme, runs)) or 'no tables between bench marks'}", err=True)
    if comparison is not None and any(change.fails(margin) for change in comparison.changes):
        raise typer.Exit(1)
