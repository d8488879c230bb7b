"""``edgevlm calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads, flag, lines, option
from edgevlm.progress import progress, to_stderr

EPILOG = """
\b
Examples:
  edgevlm calibrate demo --out DIR
  edgevlm calibrate BUNDLE --video shop.mp4 --video street.mp4

Each option has a variable: EDGEVLM_CALIBRATE_VIDEO is --video, and so on. EDGEVLM_CALIBRATE_ASK takes one question a line.
"""


def calibrate(
    bundle: Annotated[str, typer.Argument(metavar="demo|BUNDLE|CHECKPOINT|ORG/NAME", help="Measure this model.")],
    video: Annotated[list[Path] | None, option("FILE", "Measure on this clip; repeatable.", "demo: its own world")] = None,
    frames: Annotated[int | None, option("N", "Use this many frames of each clip.", "what fits", min=1)] = None,
    out: Annotated[Path | None, option("DIR", "Write a calibrated copy; leave the bundle alone.")] = None,
    policies: Annotated[str, option("all|none|NAME,..", "Choose among these policies.")] = "all",
    budget: Annotated[str | None, option("N|6k|P%,..", "Compare at these budgets.", "run's, and 12.5%")] = None,
    ask: Annotated[
        list[str] | None, option("TEXT", "Measure agreement on this question; repeatable.", "three", allow_from_autoenv=False)
    ] = None,
    layers: Annotated[bool, flag("--layers/--no-layers", "Measure the layers before comparing policies.")] = True,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Choose the best policy for a model.

    Measures what policies need to know of each layer, compares the policies at equal bytes, and finds how much of each frame
    can be left out. The bundle keeps the result, for --policy, --append and --encode auto. If interrupted, the same command
    resumes.
    """
    with progress("starting") as step:
        from edgevlm.apps import calibrate as command
        from edgevlm.apps.bundles.resolve import resolve_model

        comparison = command.parse_comparison(policies, budget, tuple(ask or lines("EDGEVLM_CALIBRATE_ASK")))
        model = resolve_model(bundle, step, to_stderr)
        request = command.CalibrateRequest(model, video or [], frames, out, threads, comparison, layers)
        result = command.start(request, step, to_stderr)
    typer.echo((command.as_json if json else command.describe)(*result))
