"""``edgevlm cameras``, ``doctor`` and ``power``: what this machine has, lacks and takes."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json


def cameras(json: Json = False) -> None:
    """List this machine's cameras.

    Each is asked for its modes and for one picture; where that fails, the line says why.
    """
    from edgevlm.progress import progress

    with progress("looking through the cameras"):
        from edgevlm.apps.doctor.cameras import list_cameras

        lines = list(list_cameras(json))
    typer.echo("\n".join(lines))


def doctor(json: Json = False) -> None:
    """Check this machine and suggest fixes.

    Exits with status 1 where a first run would fail.
    """
    from edgevlm.progress import progress

    with progress("checking this machine"):
        from edgevlm.apps.doctor import report

        lines, healthy = report(json)
    typer.echo("\n".join(lines))
    if not healthy:
        raise typer.Exit(1)


def power(
    interval: Annotated[float, typer.Option(metavar="S", help="Print a line this often.", min=0.05, max=86400)] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Stop after this long.", show_default="at ctrl-C", min=0.05, max=1e9)
    ] = None,
    json: Json = False,
) -> None:
    """Show the power this machine draws.

    One line an interval: watts of every rail, clocks and the power mode. The last line is the energy in all.
    """
    from edgevlm.apps.doctor.power import show_power

    for is_data, line in show_power(interval, seconds, json):
        typer.echo(line, err=not is_data)
