"""``edgevlm bench kv-precision``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads


def kv_precision(
    model: Annotated[list[str], typer.Option(metavar="BUNDLE", help="Exported with --kv int8 or fp16; one or more.")],
    tokens: Annotated[int, typer.Option(help="Teacher-forced.", min=2)] = 2000,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to force.", show_default="what the model says, fixed seed")
    ] = None,
    turns: Annotated[int, typer.Option(help="Of all keys before each 64 tokens, as re-indexing turns them.", min=0)] = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare a bundle's KV precision with an fp32 cache, on the same weights and text: KL, top-1 agreement, bytes."""
    from rich.console import Console

    from edgevlm.bench.kv_precision import run

    with Console(stderr=True).status("loading the model") as status:
        for result in run(model, tokens, text, turns, threads, status.update):
            line = result.line()
            typer.echo(json.dumps(line) if as_json else "  ".join(f"{name} {value}" for name, value in line.items()))
