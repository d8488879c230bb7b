"""Options that several commands have, and what they do with what was typed."""

from __future__ import annotations

import os
from enum import Enum
from typing import Annotated

import typer

from edgevlm.errors import UserError

Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores", min=1, max=256)]
Budget = Annotated[
    str | None, typer.Option(metavar="N|6k", help="Vision tokens per layer.", show_default="6144; others: as run")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]


class KV(str, Enum):
    """Of keys and values, as :data:`edgevlm.runtime.kv.KV_TYPES` names them."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


def lines(variable: str) -> list[str]:
    """One value a line: click would split at every blank."""
    return os.environ.get(variable, "").splitlines()


def pixels(size: str) -> tuple[int, int]:
    """(height, width) of ``WxH``; raises UserError."""
    width, _, height = size.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise UserError(f"--frame-size {size!r} is not WIDTHxHEIGHT in pixels, such as 640x480")
    return int(height), int(width)


def note(line: str) -> None:
    typer.echo(line, err=True)
