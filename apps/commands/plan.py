"""``edgevlm plan`` and ``edgevlm models``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import KV, Device, Json, option
from edgevlm.progress import progress, to_stderr

EPILOG = """
\b
Examples:
  edgevlm models --device orin-nano-8             what runs on an 8 GB Jetson
  edgevlm plan Qwen/Qwen3-VL-2B-Instruct          one of them, in detail
  edgevlm run --camera 0 --model HuggingFaceTB/SmolVLM2-256M-Video-Instruct
"""


def plan(
    model: Annotated[str, typer.Argument(metavar="demo|BUNDLE|CHECKPOINT|ORG/NAME", help="Plan for this model.")] = "demo",
    device: Device = None,
    budget: Annotated[
        str | None, option("N|6k", "Keep this many vision tokens per layer.", "as run, less where only that fits")
    ] = None,
    precision: Annotated[str | None, option("NAME", "Store weights as this.", "the most accurate that keeps up")] = None,
    vision_precision: Annotated[
        str | None, option("fp32|int8", "Store a CPU's vision tower as this.", "by --precision")
    ] = None,
    kv: KV = None,
    fps: Annotated[float, option("N", "Keep up with this many frames a second.")] = 2.0,
    chunk: Annotated[int, option("N", "Encode this many frames at once.", min=1)] = 8,
    frame_size: Annotated[str, option("WxH", "Expect frames of this size, as export.")] = "640x480",
    cameras: Annotated[int | None, option("N", "Plan a server of this many cameras.", "a run of one", min=1, max=256)] = None,
    json: Json = False,
) -> None:
    """Estimate memory and speed before building anything.

    Reads, or downloads, only a checkpoint's config.json; a bundle's weights are not read.
    """
    with progress("planning") as step:
        from edgevlm.apps.bundles.fetch import resolve_config
        from edgevlm.apps.planning import plan as command
        from edgevlm.apps.settings import parse_size
        from edgevlm.runtime.settings import parse_budget

        wanted = None if budget is None else parse_budget(budget)
        width, height = parse_size(frame_size, "--frame-size ")
        folder = resolve_config(model, step, to_stderr)
        asked = (device, wanted, precision, kv, fps, chunk, (height, width), vision_precision, cameras)
        lines = list(command.show(command.PlanRequest(folder, *asked), json))
    typer.echo("\n".join(lines))


def models(
    device: Device = None,
    fps: Annotated[float, option("N", "Keep up with this many frames a second.")] = 2.0,
    json: Json = False,
) -> None:
    """List models, their memory and their speed here.

    All is predicted, as by `edgevlm plan`: of each the weights that it would choose. Nothing is downloaded.
    """
    with progress("planning"):
        from edgevlm.apps.planning.plan import show_models

        lines = list(show_models(device, fps, json))
    typer.echo("\n".join(lines))
