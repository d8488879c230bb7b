"""The report for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgevlm.bench.accuracy.longstream import GAP_NAMES, LONGSTREAM
from edgevlm.bench.accuracy.report import BACKWARD, NOW, UNSEEN, Report, Row
from edgevlm.calib.intervals import Estimate

QUARTERS = {f"q{quarter}": f"{BACKWARD}/q{quarter}" for quarter in (1, 2, 3, 4)}
GAPS = {name.replace("thousands", "000s"): f"{BACKWARD}/{name}" for name in GAP_NAMES} | {"never": UNSEEN}
NAMES = {False: "full KV", True: "the oracle at 1,024 tokens"}  # of what decides which kinds enter; long streams or not


def describe(report: Report) -> str:
    """A table a budget; below them what was left out and skipped."""
    settings, rows = report.outcome.settings, report.rows
    streams, long = len(next(iter(report.outcome.records.values()))), settings.suite == LONGSTREAM
    ages = "frames since the answer was last shown" if long else "the quarter that last showed the answer, q1 to q4"
    lines = [
        f"{settings.suite}: {streams} streams of {settings.frames} frames, seed {settings.seed}; share right [95 %, by "
        f"stream]; backward by {ages}",
        "",
        *_by_kind(NAMES[long], [row for row in rows if row.cell == report.outcome.cells[0]]),
    ]
    width = max((len(row.policy) for row in rows), default=0) + 2
    for budget in dict.fromkeys(row.budget for row in rows):
        lines += [
            "",
            *_of_budget(
                budget, [row for row in rows if row.budget == budget], report.against, width, GAPS if long else QUARTERS
            ),
        ]
    for kind, of in report.left_out.items():
        lines.append(f"left out: {kind}, {NAMES[long]} has {_with_interval(of)} of it")
    for skip in report.outcome.skipped:
        lines.append(f"skipped: {skip.label} at {skip.budget}: {skip.reason}")
    return "\n".join(lines)


def _by_kind(name: str, rows: list[Row]) -> Iterator[str]:
    yield f"{name} by kind: " + ", ".join(
        f"{row.kind} {row.share.value:.3f}" for row in rows if "/" not in row.kind and row.kind not in (NOW, BACKWARD, UNSEEN)
    )


def _of_budget(budget: str, rows: list[Row], against: str, width: int, ages: Mapping[str, str]) -> Iterator[str]:
    heads = f"{'tokens':>7}{'now':>6}  {'backward':<18}{f'- {against}':<24}" + "".join(f"{name:>10}" for name in ages)
    yield f"{budget:<{width}}{heads}{'held':>7}{'any':>6}{'ttft ms':>9}{'compress ms':>13}{'MB moved':>10}"
    for policy in dict.fromkeys(row.policy for row in rows):
        of = {row.kind: row for row in rows if row.policy == policy}
        if BACKWARD not in of:
            continue
        main = of[BACKWARD]
        quarters = "".join(_share(of.get(kind), 10) for kind in ages.values())
        times = f"{main.times['ttft_ms']:>9.2f}{main.times['compress_ms']:>13.1f}{main.times['moved'] / 1e6:>10.2f}"
        yield (
            f"{policy:<{width}}{main.cell.tokens:>7}{_share(of.get(NOW))}  {_with_interval(main.share):<18}"
            f"{_with_interval(main.paired, signed=True):<24}{quarters}{_number(main.held, 7)}{_number(main.some, 6)}{times}"
        )


def _share(row: Row | None, width: int = 6) -> str:
    return _number(row.share.value if row else None, width)


def _number(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"


def _with_interval(of: Estimate | None, signed: bool = False) -> str:
    if of is None:
        return "-"
    plus = "+" if signed else ""
    return f"{of.value:{plus}.3f} [{of.low:{plus}.2f}, {of.high:{plus}.2f}]"
