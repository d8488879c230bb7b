"""``edgevlm power``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.typed import Json


def power(
    interval: Annotated[float, typer.Option(help="Seconds between two lines.", min=0.05, max=86400)] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="End after as many.", show_default="at ctrl-C", min=0.05, max=1e9)
    ] = None,
    json: Json = False,
) -> None:
    """Show what this machine takes, rail by rail, with its clocks and power mode; at the end, the energy in all."""
    from edgevlm.engines.power.show import show_power

    for is_data, line in show_power(interval, seconds, json):
        typer.echo(line, err=not is_data)
