"""Lines of JSON as HTML tables: a table for each kind of line, spreads beside their medians, what never changes above it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgevlm.bench.report.text import plain, safe
from edgevlm.bench.results.journal import Line

SPREADS = {  # a field and those of its spread
    "ms_per_token": ("low", "high"), "ms_per_frame": ("low", "high"), "ratio": ("low", "high"),
    "accuracy": ("ci_low", "ci_high"), "difference": ("difference_low", "difference_high"), "ms": ("low", "high"),
    "pass_over_read": ("pass_low", "pass_high"), "share": ("share_low", "share_high"), "frame_ms": ("frame_low", "frame_high"),
    "hold_ms": ("hold_low", "hold_high"), "write_ms": ("write_low", "write_high"), "fps": ("fps_low", "fps_high"),
    "tpot_ms": ("tpot_low", "tpot_high"), "fps_ratio": ("low", "high"), "tokens_ratio": ("tokens_low", "tokens_high"),
}  # fmt: skip
ENERGY = re.compile("joules|watts")
LONG = 24  # rows, from which a table is folded


def tables(found: Sequence[Line]) -> str:
    """All lines, those with the same fields together."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in found:
        groups.setdefault(tuple(line), []).append(line)
    return "".join(_table(group) for group in groups.values())


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text that is not escaped yet; without heads the first cell of a row is its head."""
    head = f"<thead><tr>{''.join(f'<th>{safe(name)}</th>' for name in heads)}</tr></thead>" if heads else ""
    body = "".join(_row(["td" if heads else "th", *["td"] * (len(row) - 1)], row) for row in rows)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _row(tags: Sequence[str], cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{safe(cell)}</{tag}>' for tag, cell in zip(tags, cells, strict=True))}</tr>"


def _table(found: Sequence[Line]) -> str:
    names = [name for name in found[0] if name != "bench"]
    taken = {part for name in names for part in _spread(name, found[0])}
    names = [name for name in names if name not in taken]
    fixed = [name for name in names if len(found) > 1 and all(line[name] == found[0][name] for line in found)]
    shown = [name for name in names if name not in fixed]
    if not shown:
        shown, fixed = names, []  # lines that are all the same
    heads = [_head(name, found[0]) for name in shown]
    made = grid(heads, [[_cell(name, line) for name in shown] for line in found])
    said = ", ".join(f"{_head(name, found[0])} {_cell(name, found[0])}" for name in fixed)
    above = f"<p>In all lines: {safe(said)}</p>" if said else ""
    if len(found) > LONG:
        return f"{above}<details><summary>{len(found)} lines</summary>{made}</details>"
    return above + made


def _spread(name: str, line: Line) -> list[str]:
    """Fields of the line that stand beside ``name``."""
    if name.endswith("_p50"):
        wanted = [name.replace("_p50", "_p95"), name.replace("_p50", "_p99")]
    else:
        wanted = list(SPREADS.get(name, ()))
    return [part for part in wanted if part in line]


def _head(name: str, line: Line) -> str:
    beside = [part.rpartition("_")[2] for part in _spread(name, line)]
    return name.replace("_", " ") + (f" [{', '.join(beside)}]" if beside else "")


def _cell(name: str, line: Line) -> str:
    if line[name] is None:
        return "not measured" if ENERGY.search(name) else "-"
    beside = [plain(line[part]) for part in _spread(name, line)]
    return plain(line[name]) + (f" [{', '.join(beside)}]" if beside else "")
