"""Commands that look and say what there is: ``edgevlm policies``, ``cameras``, ``doctor``, ``state show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.typed import Json

state = typer.Typer(help="Look at what --state has kept.", no_args_is_help=True)


@state.callback()
def _state() -> None:
    pass


@state.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of run --state.")],
    json: Json = False,
) -> None:
    """Say what the snapshots in a folder hold, newest first; each is verified. Exit code 1 where none can be used."""
    from edgevlm.apps.run.snapshots import show_state

    lines, usable = show_state(folder, json)
    typer.echo(lines)
    if not usable:
        raise typer.Exit(1)


def policies(
    json: Json = False,
) -> None:
    """List the policies of --policy: paper, settings with their defaults, and what is not as the paper has it; and auto."""
    from edgevlm.apps.policies import list_policies

    typer.echo(list_policies(json))


def cameras(
    json: Json = False,
) -> None:
    """List the cameras of this machine: each is asked for its modes and for one picture, and what fails says why."""
    from edgevlm.apps.cameras import list_cameras

    for line in list_cameras(json):
        typer.echo(line)


def doctor(
    json: Json = False,
) -> None:
    """Say what would stop a first run on this machine, and how to mend it. Exit code 1 where something would."""
    from edgevlm.apps.doctor import report

    lines, healthy = report(json)
    for line in lines:
        typer.echo(line)
    if not healthy:
        raise typer.Exit(1)
