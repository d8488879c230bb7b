"""Write the self-contained HTML page of ``edgevlm bench report``, with results as tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2

from edgevlm.bench.output import Line, beside, cell, head, plain
from edgevlm.bench.results.journal import Entry, Run

NOT_XML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]|[\U0001fffe-\U0001ffff]")
LONG = 24  # tables with more rows than this are collapsed


def page(runs: Sequence[Run], changes: Sequence[Line] = ()) -> str:
    """Return an HTML page of the runs, newest first. ``changes``: the differences between the newest run and a baseline."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"clean": clean, "plain": plain}
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    changed = table_of(changes) if changes else None
    return template.render(runs=list(reversed(runs)), tables=tables, changes=changed, long=LONG)


def clean(text: object, longest: int = 200) -> str:
    """Replace characters that XML does not allow with U+FFFD, and shorten long text."""
    found = NOT_XML.sub("\ufffd", str(text))
    return found if len(found) <= longest else found[: longest - 1] + "…"


def tables(entry: Entry) -> list[dict[str, Any]]:
    """Return a command's results as tables. Lines with the same fields form a table."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in entry.lines:
        groups.setdefault(tuple(line), []).append(line)
    return [table_of(group) for group in groups.values()]


def table_of(group: Sequence[Line]) -> dict[str, Any]:
    """Return a table's titles and cells as text. Fields that are the same in every line are returned in ``fixed`` instead."""
    first = group[0]
    taken = {"bench"} | {part for name in first for part in beside(name, first)}
    names = [name for name in first if name not in taken]
    fixed = [name for name in names if len(group) > 1 and all(line[name] == first[name] for line in group)]
    shown = [name for name in names if name not in fixed] or names
    return {
        "heads": [head(name, first) for name in shown],
        "rows": [[cell(name, line) for name in shown] for line in group],
        "fixed": ", ".join(f"{head(name, first)} {cell(name, first)}" for name in fixed) if shown != names else "",
    }
