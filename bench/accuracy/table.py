"""The report for people."""

from __future__ import annotations

from collections.abc import Iterator

from edgevlm.bench.accuracy.report import BACKWARD, NOW, Report, Row
from edgevlm.calib.intervals import Estimate

QUARTERS = [f"{BACKWARD}/q{quarter}" for quarter in (1, 2, 3, 4)]


def describe(report: Report) -> str:
    """A table a budget; below them what was left out and skipped."""
    settings, rows = report.outcome.settings, report.rows
    streams = len(next(iter(report.outcome.records.values())))
    lines = [
        f"streamqa: {streams} streams of {settings.frames} frames, seed {settings.seed}; share right [95 %, by stream]; "
        f"q1 to q4: backward by the quarter that last showed the answer",
        "",
        *_by_kind([row for row in rows if row.policy == "full"]),
    ]
    width = max((len(row.policy) for row in rows), default=0) + 2
    for budget in dict.fromkeys(row.budget for row in rows):
        lines += ["", *_of_budget(budget, [row for row in rows if row.budget == budget], report.against, width)]
    for kind, of in report.left_out.items():
        lines.append(f"left out: {kind}, full KV has {_with_interval(of)} of it")
    for skip in report.outcome.skipped:
        lines.append(f"skipped: {skip.label} at {skip.budget}: {skip.reason}")
    return "\n".join(lines)


def _by_kind(rows: list[Row]) -> Iterator[str]:
    yield "full KV by kind: " + ", ".join(
        f"{row.kind} {row.share.value:.3f}" for row in rows if "/" not in row.kind and row.kind not in (NOW, BACKWARD)
    )


def _of_budget(budget: str, rows: list[Row], against: str, width: int) -> Iterator[str]:
    heads = f"{'tokens':>7}{'now':>6}  {'backward':<18}{f'- {against}':<24}" + "".join(f"{f'q{n}':>6}" for n in (1, 2, 3, 4))
    yield f"{budget:<{width}}{heads}{'held':>7}{'any':>6}{'ttft ms':>9}{'compress ms':>13}"
    for policy in dict.fromkeys(row.policy for row in rows):
        of = {row.kind: row for row in rows if row.policy == policy}
        if BACKWARD not in of:
            continue
        main = of[BACKWARD]
        quarters = "".join(_share(of.get(kind)) for kind in QUARTERS)
        times = f"{main.times['ttft_ms']:>9.2f}{main.times['compress_ms']:>13.1f}"
        yield (
            f"{policy:<{width}}{main.cell.tokens:>7}{_share(of.get(NOW))}  {_with_interval(main.share):<18}"
            f"{_with_interval(main.paired, signed=True):<24}{quarters}{_number(main.held, 7)}{_number(main.some, 6)}{times}"
        )


def _share(row: Row | None) -> str:
    return _number(row.share.value if row else None, 6)


def _number(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"


def _with_interval(of: Estimate | None, signed: bool = False) -> str:
    if of is None:
        return "-"
    plus = "+" if signed else ""
    return f"{of.value:{plus}.3f} [{of.low:{plus}.2f}, {of.high:{plus}.2f}]"
