"""Print a benchmark's results: JSON lines, or a table whose rows appear as they are measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import typer

from edgevlm.bench.schemas import SPREADS, bench_line

Line = dict[str, Any]

# columns that a terminal shows for each measurement; --json prints all fields
COLUMNS = json.loads(files(__package__).joinpath("columns.json").read_text(encoding="utf-8"))


def plain(value: Any) -> str:
    """Format a number for a table, such as ``1,184``, ``26.4`` or ``0.0012``. Any other value is returned unchanged."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(one)}" for name, one in value.items()) or "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}" if abs(value) < 10**15 else f"{value:.3e}" if abs(value) < 10**300 else "huge"
    return f"{value:.6g}" if 0.99 < abs(value) < 1 else f"{value:.3g}"


def printable(text: str, longest: int = 160) -> str:
    short = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return short if short.isprintable() else ascii(short)[1:-1]


def beside(name: str, line: Line) -> list[str]:
    """Return the names of the fields that give a figure's spread, such as its quartiles."""
    percentiles = (name.replace("_p50", "_p95"), name.replace("_p50", "_p99"))
    return [part for part in (percentiles if name.endswith("_p50") else SPREADS.get(name, ())) if part in line]


def head(name: str, line: Line) -> str:
    """Return a column's title, such as ``ms per token [low, high]``."""
    parts = [part.rpartition("_")[2] for part in beside(name, line)]
    return name.replace("_", " ") + (f" [{', '.join(parts)}]" if parts else "")


def cell(name: str, line: Line) -> str:
    """Return a value and its spread as text, such as ``26 [25, 27.5]``."""
    parts = [plain(line[part]) for part in beside(name, line)]
    return plain(line.get(name)) + (f" [{', '.join(parts)}]" if parts and line.get(name) is not None else "")


class Table:
    """Prints results line by line, with a new header wherever the columns change."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._heads = as_json, list[str]()

    def print(self, line: Line) -> None:
        if self._as_json:
            typer.echo(bench_line(line))
            return
        names = [name for name in COLUMNS.get(str(line.get("bench")), " ".join(line)).split() if name in line]
        heads = [head(name, line) for name in names]
        of_text = [20 if beside(name, line) else 16 if isinstance(line[name], str) else 8 for name in names]
        widths = [max(len(title), width) for title, width in zip(heads, of_text, strict=True)]
        if heads != self._heads:
            self._heads = heads
            self._row(heads, widths)
        self._row([cell(name, line) for name in names], widths)

    def print_all(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.print(line)

    def say(self, text: str) -> None:
        typer.echo(printable(text, 2000))

    def _row(self, cells: Sequence[str], widths: Sequence[int]) -> None:
        texts = (f"{printable(text):<{width}}" for text, width in zip(cells, widths, strict=True))
        typer.echo("  ".join(texts).rstrip())
