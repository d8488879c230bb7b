"""``edgevlm bench compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.bench.results.typed import FailOver, Force


def compare(
    new: Annotated[str, typer.Argument(metavar="NEW", help="A file or folder of results, #ID for a run of it.")],
    old: Annotated[str, typer.Argument(metavar="OLD")],
    fail_over: FailOver = "20%",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare the last runs of two files, line by line; exit code 1 where the new one is worse."""
    from edgevlm.bench.results.baseline import compared

    if compared(new, old, fail_over, force, as_json):
        raise typer.Exit(1)
