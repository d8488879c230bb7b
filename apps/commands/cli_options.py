"""Options that several commands have, and what they do with what was typed."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from edgevlm.errors import UserError


def check_kv(text: str | None) -> str | None:
    """A precision of keys and values, as typed. Raises UserError for one that no cache has."""
    from edgevlm.runtime.kv import KV_TYPES

    if text is not None and text not in KV_TYPES:
        raise UserError(f"--kv {text}: give {', '.join(KV_TYPES)}")
    return text


def threads(default: str) -> typer.models.OptionInfo:
    return typer.Option(metavar="N", help="Use this many CPU threads.", show_default=default, min=1, max=256)


Threads = Annotated[int | None, threads("physical cores")]
Budget = Annotated[
    str | None,
    typer.Option(metavar="N|6k", help="Keep this many vision tokens per layer.", show_default="6144; others: as run"),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Plan for orin-nano-8, orin-agx-64, cpu, cuda, ..", show_default="this machine"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
KV = Annotated[
    str | None,
    typer.Option(
        metavar="fp32|fp16|int8",
        help="Store keys and values as this.",
        show_default="fp16 on GPUs, else fp32",
        callback=check_kv,
    ),
]


def lines(variable: str) -> list[str]:
    """One value a line: click would split at every blank."""
    return os.environ.get(variable, "").splitlines()


def parse_size(option: str, text: str) -> tuple[int, int]:
    """(width, height) of ``1280x720``. Raises UserError for what is none."""
    if not (match := re.fullmatch(r"(\d{1,5})[xX](\d{1,5})", text.strip())) or "0" in match.groups():
        raise UserError(f"{option} {text}: give width and height in pixels, like 640x480")
    return int(match[1]), int(match[2])


def note(line: str) -> None:
    typer.echo(line, err=True)
