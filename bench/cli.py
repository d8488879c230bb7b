"""``edgevlm bench``: performance and accuracy as commands."""

from __future__ import annotations

import sys

import typer

from edgevlm.bench.commands import COMMANDS

app = typer.Typer(help="Measure what edgevlm claims.", no_args_is_help=True)
for command in COMMANDS:
    app.command(epilog=getattr(sys.modules[command.__module__], "EPILOG", None))(command)


@app.callback()
def _bench() -> None:
    pass
