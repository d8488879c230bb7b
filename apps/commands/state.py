"""``edgevlm state``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.apps.commands.lazy import lazy_app

app = lazy_app(
    {"show": (f"{__name__}:show", "Verify and describe a directory's snapshots.")}, name="state", help="Inspect saved state."
)


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Read what run --state kept there.")], json: Json = False
) -> None:
    """Verify and describe a directory's snapshots.

    The newest comes first. Exits with status 1 where none can be used.
    """
    from edgevlm.apps.run.snapshots import show_state

    lines, usable = show_state(folder, json)
    typer.echo(lines)
    if not usable:
        raise typer.Exit(1)
