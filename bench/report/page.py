"""The page: a section a run, its machine and versions, then each command with its charts, tables and errors; the JSON last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgevlm.bench.report.figures import figures
from edgevlm.bench.report.style import STYLE
from edgevlm.bench.report.tables import grid, tables
from edgevlm.bench.report.text import plain, safe
from edgevlm.bench.results.compare import Comparison, said
from edgevlm.bench.results.journal import Entry, Line, Run
from edgevlm.errors import UserError

BEGIN, END = '<script type="application/json" id="results">', "</script>"


def write(path: Path, runs: Sequence[Run], comparison: Comparison | None = None, margin: float = 0.2) -> None:
    """Raises UserError where ``path`` cannot be written."""
    try:
        path.write_text(page(runs, comparison, margin), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None


def page(runs: Sequence[Run], comparison: Comparison | None = None, margin: float = 0.2) -> str:
    """HTML of the runs, newest first; comparison: of the newest with an earlier one, ``margin`` what counts as worse."""
    return "\n".join(_parts(runs, comparison, margin)) + "\n"


def extract(path: Path) -> list[Line]:
    """The lines of JSON that a page was made of. Raises UserError for a file without them."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text.partition(BEGIN)[2].partition(END)[0])
        if not isinstance(found, list):
            raise ValueError
    except OSError as error:
        raise UserError(f"--extract {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"--extract {path}: holds no results; give a page that edgevlm bench report wrote") from None
    return found


def _parts(runs: Sequence[Run], comparison: Comparison | None, margin: float) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>edgevlm: measured</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>edgevlm: measured</h1>"
    yield (
        "<p>Medians, with quartiles or percentiles where a bench gives them. The commands are under their tables, the JSON is "
        "in this file: <code>edgevlm bench report --extract FILE</code>.</p>"
    )
    if comparison:
        yield from _compared(comparison, margin)
    for run in reversed(runs):
        yield from _section(run)
    lines = [line for run in runs for line in run.journal()]
    yield f"{BEGIN}{json.dumps(lines).replace('<', chr(92) + 'u003c')}{END}\n</body>\n</html>"


def _section(run: Run) -> Iterator[str]:
    yield f"<section>\n<h2>Run {safe(run.id)}</h2>"
    if run.header:
        yield f"<p>Begun {safe(run.header.get('at', 'at an unknown time'))}. {safe(run.header.get('note', ''))}</p>"
        halves = [
            f"<div><h3>{name.title()}</h3>{grid((), _named(run.section(name)))}</div>" for name in ("machine", "versions")
        ]
        yield f'<div class="pair">{"".join(halves)}</div>'
    else:
        yield "<p>These lines do not say what machine and versions they are from.</p>"
    for entry in run.entries.values():
        yield from _entry(entry, run)
    yield "</section>"


def _entry(entry: Entry, run: Run) -> Iterator[str]:
    yield f"<h3>{safe(entry.name)}</h3>"
    if entry.error is not None:
        yield f'<p class="error">Failed: {safe(entry.error)}</p>'
    yield from figures(entry, run)
    yield tables(entry.lines)
    if entry.command:
        took = f", {entry.seconds:.0f} s" if entry.seconds is not None else ""
        yield f"<p><code>{safe(entry.command)}</code>{took}</p>"


def _compared(comparison: Comparison, margin: float) -> Iterator[str]:
    yield "<section>\n<h2>Against the baseline</h2>"
    yield f"<p>Over {100 * margin:g} % worse, with spreads that do not overlap, fails.</p>"
    rows = [
        [
            "worse" if change.fails(margin) else "", plain(change.worse), change.field, plain(change.new), plain(change.old),
            said(change.place),
        ]
        for change in sorted(comparison.changes, key=lambda change: -change.worse)
    ]  # fmt: skip
    yield grid(("", "times worse", "field", "new", "old", "where"), rows)
    yield f"<p>Lines in one alone: {comparison.only_new} new, {comparison.only_old} old.</p></section>"


def _named(fields: dict[str, Any]) -> list[list[str]]:
    return [[name.replace("_", " "), _said(value)] for name, value in fields.items()]


def _said(value: Any) -> str:
    if value is None or value == {}:
        return "not found"
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(one)}" for name, one in value.items())
    return plain(value)
