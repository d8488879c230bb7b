"""``edgevlm bench store``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json


def store(
    rows: Annotated[int, typer.Option(help="Of a cluster.", min=1)] = 32,
    heads: Annotated[int, typer.Option(help="KV heads of a cluster.", min=1)] = 2,
    head_dim: Annotated[int, typer.Option(help="Numbers of a key, fp16.", min=1)] = 64,
    clusters: Annotated[int, typer.Option(help="In the store.", min=2)] = 20_000,
    asked: Annotated[int, typer.Option(help="Clusters fetched at once.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="Medians are taken over as many.", min=1)] = 15,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write there, and remove it again.", show_default="/tmp")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what it takes to fetch clusters from host memory and from the disk, beside a read a row and without reading ahead."""
    from edgevlm.bench.store import measure
    from edgevlm.errors import UserError

    if asked > clusters:
        raise UserError(f"--asked {asked} of --clusters {clusters}: ask for no more than there are")
    found = measure(rows, heads, head_dim, clusters, asked, rounds, out)
    if as_json:
        typer.echo(json.dumps(found.line()))
        return
    for what, figure, unit in (
        ("a cluster", found.bytes, "bytes"),
        ("put, written through", 1e3 * found.put_ms, "us a cluster"),
        ("put, the plainest store", 1e3 * found.plain_put_ms, "us a cluster"),
        (f"{asked} from host memory", found.host_ms, "ms"),
        (f"{asked} from the disk, cold", found.disk_ms, "ms"),
        ("the same by a read a row, cold", found.rows_ms, "ms"),
        ("a read a row / a read a cluster", found.rows_over_disk, f"x [{found.rows_low:.3f}, {found.rows_high:.3f}]"),
        (f"{asked} cold, expected before", found.wait_ms, "ms"),
        (f"{asked} cold, not expected", found.unexpected_ms, "ms"),
        ("expected / not expected", found.wait_over_unexpected, f"x [{found.wait_low:.3f}, {found.wait_high:.3f}]"),
    ):
        typer.echo(f"{what:<34}{figure:>12,.3f} {unit}")
