"""``edgevlm bench checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def checkpoint(
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0)] = 0,
) -> None:
    """Write a checkpoint of LLaVA-OneVision-0.5B's shape with random weights: to measure speed with, and nothing else.

    1.8 GB of disk, 4 GB of memory for a while. edgevlm export and transformers read it; prints the folder.
    """
    from edgevlm.packages import needed

    seeded = needed("edgevlm.bench.seeded_checkpoint", "a checkpoint of random weights")
    typer.echo(str(seeded.write(out, seed=seed, progress=lambda what: typer.echo(what, err=True))))
