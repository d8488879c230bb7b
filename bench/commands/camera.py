"""``edgevlm bench camera``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads


def camera(
    camera: Annotated[str | None, typer.Option(metavar="SRC", help="As for run.", show_default="demo")] = None,
    video: Annotated[str | None, typer.Option(metavar="FILE", help="As for run.")] = None,
    model: Annotated[str, typer.Option(metavar="demo|BUNDLE")] = "demo",
    frames: Annotated[int, typer.Option(help="Measured, after two that are not.", min=1)] = 20,
    fps: Annotated[float, typer.Option(help="Frames a second taken from the source.")] = 2.0,
    realtime: Annotated[
        bool, typer.Option("--realtime/--no-realtime", help="Play what is recorded at its own speed, as a camera would.")
    ] = True,
    inline: Annotated[bool, typer.Option("--inline", help="Prepare frames in the thread that watches, to compare.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say how long a frame takes from the source to an answer that has seen it, stage by stage."""
    from edgevlm.apps.sources import SourceOptions
    from edgevlm.bench.camera import CameraBench, run

    options = SourceOptions(fps=fps, realtime=realtime)
    for number, stage in enumerate(run(CameraBench(camera, video, model, frames, inline, threads, options))):
        if as_json:
            typer.echo(json.dumps(stage.line()))
            continue
        if number == 0:
            typer.echo(f"{stage.source}, {stage.frames} frames\n{'stage':<12}{'ms p50':>10}{'ms p95':>10}")
        typer.echo(f"{stage.stage:<12}{stage.ms_p50:>10.2f}{stage.ms_p95:>10.2f}")
