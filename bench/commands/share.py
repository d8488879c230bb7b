"""``edgevlm bench share``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Budget, Json, Threads


def share(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="seeded-0.5b|demo|BUNDLE",
            help="One or more. seeded-0.5b: LLaVA-OneVision-0.5B's decoder, random weights, filled with noise; no vision.",
            show_default="seeded-0.5b, demo",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default="infinipot-v, hermes, purekv"),
    ] = None,
    budget: Budget = None,
    frames: Annotated[
        int | None, typer.Option(help="Measured; on to the end of a cycle.", show_default="16; demo: 1024", min=1)
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what a frame's time goes to once the memory is full, and compression's share of it.

    Guidance is apart. seeded-0.5b takes 3 GB of memory, 1.5 GB of disk for a while, and 2 minutes a policy on one core.
    """
    from edgevlm.apps.run.launch import parse_count
    from edgevlm.bench.share import PARTS, SEEDED, run

    heads = ("frame ms", "fps", *(name.removesuffix("_ms") for name in PARTS), "share %")
    names, policies = model or [SEEDED, "demo"], policy or ["infinipot-v", "hermes", "purekv"]
    tokens = parse_count(budget) if budget is not None else None
    results = run(names, policies, tokens, frames, threads, lambda what: typer.echo(what, err=True))
    for number, result in enumerate(results):
        line = result.line()
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'model':<14}{'policy':<24}{'budget':>8}{''.join(f'{head:>10}' for head in heads)}")
        numbers = (line["frame_ms"], line["fps"], *(line[name] for name in PARTS), 100 * line["share"])
        cells = "".join(f"{'-':>10}" if value is None else f"{value:>10.3f}" for value in numbers)
        typer.echo(f"{result.model:<14}{result.policy:<24}{result.budget:>8}{cells}")
