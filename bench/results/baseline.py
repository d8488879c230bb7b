"""What commands that compare have in common: the comparison printed."""

from __future__ import annotations

import json

import typer

from edgevlm.bench.results.compare import compare, margin_of, table
from edgevlm.bench.results.journal import Run, read_runs
from edgevlm.errors import UserError


def compared(new: str, old: str, fail_over: str, force: bool, as_json: bool) -> bool:
    """Print the comparison; whether anything is worse."""
    margin = margin_of(fail_over)
    found = compare(last_run(new), last_run(old), force=force)
    if as_json:
        for change in found.changes:
            typer.echo(json.dumps(change.line(margin)))
    else:
        typer.echo(f"{'worse':>7}  {'field':<17}{'new':>12}{'old':>12}")
        for text in table(found, margin):
            typer.echo(text)
    return any(change.fails(margin) for change in found.changes)


def last_run(place: str) -> Run:
    """Of ``FILE``, ``DIR`` or either with ``#ID``. Raises UserError where there is none."""
    runs = read_runs([place])
    if not runs:
        raise UserError(f"{place}: has no results")
    return runs[-1]
