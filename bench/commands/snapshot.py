"""``edgevlm bench snapshot``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Budget, Json, Threads


def snapshot(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="seeded-0.5b|demo|BUNDLE", help="One or more, as for share.", show_default="seeded-0.5b, demo"),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default="infinipot-v, h2o")
    ] = None,
    budget: Budget = None,
    rounds: Annotated[int, typer.Option(help="Medians are taken over as many.", min=1)] = 7,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write there, and remove it again.", show_default="/tmp")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say how long a snapshot holds the stream, beside a frame's time, and how long it then takes to be on disk."""
    from edgevlm.apps.run.launch import parse_count
    from edgevlm.bench.share import SEEDED
    from edgevlm.bench.snapshot import run

    tokens = parse_count(budget) if budget is not None else None
    names, policies = model or [SEEDED, "demo"], policy or ["infinipot-v", "h2o"]
    heads = ("MB", "frame ms", "hold ms", "hold/frame", "write ms")
    results = run(names, policies, tokens, rounds, threads, out, lambda what: typer.echo(what, err=True))
    for number, result in enumerate(results):
        line = result.line()
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'model':<14}{'policy':<16}{'budget':>8}{''.join(f'{head:>12}' for head in heads)}")
        figures = (result.bytes / 1e6, line["frame_ms"], line["hold_ms"], line["hold_over_frame"], line["write_ms"])
        typer.echo(f"{result.model:<14}{result.policy:<16}{result.budget:>8}{''.join(f'{x:>12.3f}' for x in figures)}")
