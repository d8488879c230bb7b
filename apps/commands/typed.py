"""What several commands do with what was typed."""

from __future__ import annotations

import os

import typer

from edgevlm.errors import UserError


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
