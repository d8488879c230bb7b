"""``edgevlm build``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.typed import Json, note


def build(
    bundle: Annotated[str, typer.Argument(help="A bundle that edgevlm export --device wrote.")],
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Refuse to build on anything but this device.", show_default="this machine's GPU"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="N|6k", help="The largest budget of sessions that will run it.", show_default="as run"),
    ] = None,
    workspace: Annotated[int, typer.Option(metavar="MB", help="Memory that a layer may work with.")] = 1024,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes/--no-probes", help="Without, for policies that do not look at attention, calls take less memory."
        ),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Build engines that are there too.")] = False,
    json: Json = False,
) -> None:
    """Build a bundle's TensorRT engines on this device, which takes minutes each; prints where they are.

    Engines that are there and match are left alone. When it is stopped or killed, the same command goes on.
    """
    from rich.console import Console

    from edgevlm.apps import build as command
    from edgevlm.apps.run.launch import parse_count

    wanted = None if budget is None else parse_count(budget)
    request = command.BuildRequest(bundle, device, wanted, workspace, probes, force)
    with Console(stderr=True).status("reading the bundle") as status:
        for line in command.build(request, note, status.update, json):
            typer.echo(line)
