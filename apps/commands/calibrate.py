"""``edgevlm calibrate``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads, lines


class Measure(str, Enum):
    """How policies are compared."""

    STREAMQA = "streamqa"
    AGREEMENT = "agreement"


def calibrate(
    bundle: Annotated[str, typer.Argument(metavar="demo|BUNDLE", help="The model to measure.")],
    video: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A clip to measure on; once or more.", show_default="the demo world, for demo"),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            help="Frames of each clip, and of streamqa's streams.",
            show_default="all that the model holds, 6,000 tokens at most; 64",
            min=1,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a calibrated copy and leave the bundle as it is.")
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="all|none|NAME[:K=V,...],...", help="The policies that --policy auto is chosen among.")
    ] = "all",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|6k|P%,...",
            help="Budgets to compare policies at: vision tokens per layer, or shares of a clip.",
            show_default="the one of a run, and 12.5%",
        ),
    ] = None,
    measure: Annotated[
        Measure | None,
        typer.Option(
            help="How policies are compared: by the demo world's questions, or by agreement with full KV's next tokens.",
            show_default="streamqa for demo, else agreement",
        ),
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A question for agreement to be measured on; once or more.",
            show_default="three plain ones",
            allow_from_autoenv=False,
        ),
    ] = None,
    streams: Annotated[int, typer.Option(help="Streams of streamqa.", min=2)] = 24,
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="Measure the layers, or compare the policies on what the bundle has.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|png", help="Draw the attention of each layer over age.")
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure what the policies need to know of a model, and which of them does best on it; write it into its bundle.

    The thresholds of infinipot-v's windows, the layer classes of hermes, the agreement of layers that purekv stands on.

    Then the policies themselves, at equal bytes, for --policy auto. When it is stopped, the same command goes on.
    """
    from rich.console import Console

    from edgevlm.apps import calibrate as command

    asked = tuple(ask or lines("EDGEVLM_CALIBRATE_ASK"))
    comparison = command.parse_comparison(policies, budget, measure and measure.value, asked, streams)
    request = command.CalibrateRequest(bundle, video or [], frames, out, plot, threads, comparison, layers)
    with Console(stderr=True).status("starting") as status:
        result = command.start(request, status.update, lambda text: typer.echo(text, err=True))
    typer.echo((command.as_json if json else command.describe)(*result))
