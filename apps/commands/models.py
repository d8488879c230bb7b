"""``edgevlm models``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Device, Json

EPILOG = """
\b
Examples:
  edgevlm models --device orin-nano-8             what runs on an 8 GB Jetson
  edgevlm plan Qwen/Qwen3-VL-2B-Instruct          one of them, in detail
  edgevlm run --camera 0 --model HuggingFaceTB/SmolVLM2-256M-Video-Instruct
"""


def models(
    device: Device = None,
    fps: Annotated[float, typer.Option(metavar="N", help="Keep up with this many frames a second.")] = 2.0,
    json: Json = False,
) -> None:
    """List models, their memory and their speed here.

    All is predicted, as by `edgevlm plan`: of each the weights that it would choose. Nothing is downloaded.
    """
    from edgevlm.progress import progress

    with progress("planning"):
        from edgevlm.apps.planning.catalogue import show

        lines = list(show(device, fps, json))
    for line in lines:
        typer.echo(line)
