"""``edgevlm bench precision``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads


def precision(
    model: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="A checkpoint directory, as for export.")],
    precisions: Annotated[
        str, typer.Option(metavar="NAME,...", help="As for export --precision; int4+awq: with --scaling awq.")
    ] = "fp32,fp16,int8,int4,int4-zp,int4+awq",
    tokens: Annotated[int, typer.Option(help="Of text that both are made to read.", min=1, max=20000)] = 2000,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare weight precisions with fp32: how often the same token is likeliest, KL in nats, size, milliseconds a token.

    The text is Python's own help topics. Each precision is exported into a temporary folder.
    """
    from edgevlm.packages import needed

    bench = needed("edgevlm.bench.precision", "exporting a checkpoint")
    results = bench.run(model, precisions.split(","), tokens, threads, lambda what: typer.echo(what, err=True))
    for number, result in enumerate(results):
        line = {"bench": "precision", "model": model.resolve().name} | result.line()
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'precision':<12}{'top-1':>8}{'KL':>10}{'MB':>9}{'/fp32':>7}{'ms':>8}{'fp32 ms':>9}")
        typer.echo(
            f"{result.precision:<12}{line['top1']:>8.4f}{line['kl']:>10.5f}{line['decoder_mb']:>9.1f}"
            f"{line['size_over_fp32']:>7.3f}{line['ms_per_token']:>8.2f}{line['fp32_ms_per_token']:>9.2f}"
        )
