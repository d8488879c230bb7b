"""``edgevlm state``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json

app = typer.Typer(help="Inspect saved state.", no_args_is_help=True)


@app.callback()
def _state() -> None:
    pass


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The directory given to run --state.")], json: Json = False
) -> None:
    """Verify and describe a directory's snapshots, newest first.

    Exits with status 1 where none can be used.
    """
    from edgevlm.apps.run.snapshots import show_state

    lines, usable = show_state(folder, json)
    typer.echo(lines)
    if not usable:
        raise typer.Exit(1)
