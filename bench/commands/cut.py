"""``edgevlm bench cut``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, Threads


def cut(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="seeded-0.5b|demo|BUNDLE",
            help="One or more. seeded-0.5b: LLaVA-OneVision-0.5B's decoder, random weights.",
            show_default="seeded-0.5b, demo",
        ),
    ] = None,
    held: Annotated[
        list[int] | None, typer.Option(help="Rows in the memory; one or more.", show_default="300 and 6000", min=1)
    ] = None,
    precision: Annotated[str, typer.Option(help="Of seeded-0.5b's weights.")] = "fp32",
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(help="Pairs that medians are taken over.", min=1)] = 30,
    as_json: Json = False,
) -> None:
    """Time a step through the cut decoder, layer by layer, beside the whole graph: one row, and a frame's rows.

    seeded-0.5b takes 4 GB of memory, 1.5 GB of disk for a while, and about 2 minutes on two cores.
    """
    from edgevlm.bench.cut import HELD, SEEDED, run

    lines = run(model or [SEEDED, "demo"], held or HELD, rounds, threads, precision, lambda what: typer.echo(what, err=True))
    heads = ("held", "rows", "whole ms", "cut ms", "cut/whole", "low", "high")
    for number, line in enumerate(lines):
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'model':<14}{'weights':>9}{'kv':>6}{''.join(f'{head:>11}' for head in heads)}")
        times = (line["whole_ms"], line["cut_ms"], line["ratio"], line["low"], line["high"])
        cells = f"{line['held']:>11,}{line['rows']:>11}" + "".join(f"{value:>11.3f}" for value in times)
        typer.echo(f"{line['model']:<14}{line['precision']:>9}{line['kv']:>6}{cells}")
