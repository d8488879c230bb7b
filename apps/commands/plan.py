"""``edgevlm plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, pixels


def plan(
    model: Annotated[
        str, typer.Argument(metavar="demo|BUNDLE|CHECKPOINT", help="A checkpoint needs its config.json alone.")
    ] = "demo",
    device: Annotated[str, typer.Option(metavar="NAME", help="orin-nano-8, orin-agx-64, cpu, cuda and others.")] = "cpu",
    budget: Annotated[
        str | None, typer.Option(metavar="N|6k", help="Vision tokens held per layer.", show_default="as run")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the weights.",
            show_default="the bundle's, or that a checkpoint is rounded to; else int4 on a Jetson, fp32 elsewhere",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|fp16|int8", help="Of keys and values.", show_default="fp16 on a GPU; on a CPU the bundle's, else fp32"
        ),
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames a second to keep up with.")] = 2.0,
    chunk: Annotated[int, typer.Option(help="Frames encoded and added to the memory at once.", min=1)] = 8,
    frame_size: Annotated[str, typer.Option(metavar="WxH", help="The camera's frames, as for export.")] = "640x480",
    measure: Annotated[bool, typer.Option("--measure", help="Run it on this CPU and compare the memory it takes.")] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Print published figures beside the plan's, and exit.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what a model takes of a device's memory, whether it fits, and how fast it would be, without building anything."""
    from edgevlm.apps.planning import plan as command
    from edgevlm.apps.run.launch import parse_count

    if published:
        lines = command.show_published(json)
    else:
        wanted = None if budget is None else parse_count(budget)
        request = command.PlanRequest(model, device, wanted, precision, kv, fps, chunk, pixels(frame_size))
        lines = command.show(request, json, measure)
    for line in lines:
        typer.echo(line)
