"""Options that several commands have, and what they do with what was typed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.errors import UserError


def check_kv(text: str | None) -> str | None:
    """A precision of keys and values, as typed. Raises UserError for one that no cache has."""
    from edgevlm.runtime.kv import KV_TYPES

    if text is not None and text not in KV_TYPES:
        raise UserError(f"--kv {text}: give {', '.join(KV_TYPES)}")
    return text


def check_finite(param: typer.CallbackParam, value: Any) -> Any:
    """A number as typed. Raises UserError for NaN, infinity and numbers that computing with makes infinite."""
    if isinstance(value, float) and not (value == 0 or 1e-9 <= abs(value) <= 1e15):
        raise UserError(f"{param.opts[0]} {value:g}: give an ordinary number")
    return value


def option(metavar: str | None, help: str, default: str | bool = True, panel: str | None = None, **more: Any) -> Any:
    """An option as ``--help`` shows it. default: in words, where the value does not say it; panel: its heading."""
    more.setdefault("callback", check_finite)
    return typer.Option(metavar=metavar, help=help, show_default=default, rich_help_panel=panel, **more)


def flag(name: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """An option without a value: ``--json``, or ``--layers/--no-layers``."""
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


def threads(default: str | bool = True, panel: str | None = None) -> Any:
    return option("N", "Use this many CPU threads.", default, panel, min=1, max=256)


Threads = Annotated[int | None, threads("physical cores")]
Budget = Annotated[str | None, option("N|6k", "Keep this many vision tokens per layer.", "6144; others: as run")]
Device = Annotated[str | None, option("NAME", "Plan for orin-nano-8, orin-agx-64, cpu, cuda, ..", "this machine")]
Json = Annotated[bool, flag("--json", "Print one JSON object a line.")]
KeyFile = Annotated[Path | None, option("FILE", "Read the server's key from this file.")]
Snapshots = Annotated[str | None, option("ADDRESS", "Keep snapshots at s3://BUCKET/FOLDER or the like.", "in --state")]
EncryptWith = Annotated[Path | None, option("FILE", "Encrypt snapshots with this key.")]
StateKeyFile = Annotated[Path | None, option("FILE", "Read encrypted snapshots with this key.")]
KV = Annotated[
    str | None, option("fp32|fp16|int8", "Store keys and values as this.", "fp16 on GPUs, else fp32", callback=check_kv)
]


def lines(variable: str) -> list[str]:
    """One value a line: click would split at every blank."""
    return os.environ.get(variable, "").splitlines()


def parse_size(option: str, text: str) -> tuple[int, int]:
    """(width, height) of ``1280x720``. Raises UserError if it is invalid."""
    if not (match := re.fullmatch(r"(\d{1,5})[xX](\d{1,5})", text.strip())) or "0" in match.groups():
        raise UserError(f"{option} {text}: give width and height in pixels, like 640x480")
    return int(match[1]), int(match[2])
