"""``edgevlm bench prefill-pattern``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads


def prefill_pattern(
    held: Annotated[
        list[int] | None, typer.Option(help="Vision tokens in the memory; one or more.", show_default="6144 and 24576", min=1)
    ] = None,
    frames: Annotated[int, typer.Option(help="Of 196 tokens, in one call.", min=1)] = 1,
    layers: Annotated[int, typer.Option(help="Of LLaVA-OneVision-0.5B's shape.", min=1)] = 8,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(help="Pairs of calls that medians are taken over.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Time a frame's prefill through PureKV's ST-SpAttn graph beside dense prefill, in pairs.

    The weights are random. With the defaults it takes 2 GB of memory, half a GB of disk for a while and about a minute.
    """
    from edgevlm.packages import needed

    bench = needed("edgevlm.bench.st_spattn", "a model of random weights")
    lines = bench.prefill_pattern(held=held or bench.HELD, frames=frames, layers=layers, threads=threads, repeats=repeats)
    for number, line in enumerate(lines):
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            rows = f"{frames} x {line['tokens_per_frame']} rows"
            typer.echo(f"{layers} layers, sparse from layer {line['st_spattn_from']}; {rows}")
            typer.echo(f"{'held':>8}{'dense ms':>11}{'ST-SpAttn ms':>14}{'dense/sparse':>14}")
        typer.echo(f"{line['held']:>8}{line['dense_ms']:>11.1f}{line['st_spattn_ms']:>14.1f}{line['ratio']:>14.2f}")
