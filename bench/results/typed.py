"""Options of the commands that compare."""

from __future__ import annotations

from typing import Annotated

import typer

Baseline = Annotated[str | None, typer.Option(metavar="FILE[#ID]", help="Compare the newest run with this earlier one.")]
FailOver = Annotated[str, typer.Option(metavar="N%", help="Worse by more, and not by chance, is exit code 1.")]
Force = Annotated[bool, typer.Option("--force", help="Compare runs of different machines.")]
