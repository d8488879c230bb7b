"""Two pictures in one SVG: accuracy against budget, and the patches of one stream that each policy kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from edgevlm.bench.accuracy.cells import Cell
from edgevlm.bench.accuracy.entries import FULL, ORACLE
from edgevlm.bench.accuracy.report import BACKWARD, Report, Row
from edgevlm.bench.accuracy.streamqa import SUITES, seed_words
from edgevlm.calib.demo.world import COLORS, GRID
from edgevlm.errors import UserError

PALETTE = (
    "#222222", "#999999", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#004488", "#997700", "#117733",
    "#882255", "#ee7733", "#6699cc", "#994455", "#44aa99",
)  # fmt: skip
INK, FAINT = "#222", "#ddd"
LEFT, TOP, WIDE, HIGH = 60, 40, 640, 320  # of the chart, pixels
PATCH, GAP, STRIP = 3, 3, 22  # of the picture: a patch, between frames, between policies
NAMES = 230  # room for names, right of the chart and left of the strips


def check_plot(path: Path) -> None:
    """Refuse, before long work, what :func:`plot` could not write."""
    if path.suffix.lower() != ".svg":
        raise UserError(f"--plot {path}: give a file that ends in .svg")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")


def plot(report: Report, path: Path) -> None:
    """Write both pictures to ``path``. Raises UserError."""
    try:
        path.write_text(svg(report), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror})") from None


def svg(report: Report) -> str:
    top = TOP + HIGH + 80
    strips = list(_strips(report, top))
    frames = report.outcome.settings.frames
    width = max(LEFT + WIDE, NAMES + frames * (GRID * PATCH + GAP)) + NAMES
    height = top + STRIP * (len(_shown(report)) + 2) + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
        f'fill="{INK}"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *_chart(report), *strips, "</svg>", ""])


def _chart(report: Report) -> Iterator[str]:
    """Shares of ``backward`` over the budget, on a logarithmic axis, with 95 % intervals; dashed: full KV and the oracle."""
    rows = [row for row in report.rows if row.kind == BACKWARD]
    budgets = sorted({_percent(row) for row in rows if row.policy != FULL})
    if not budgets:
        return
    low, high = math.log(budgets[0]) - 0.1, math.log(budgets[-1]) + 0.1

    def x(percent: float) -> float:
        return LEFT + WIDE * (math.log(percent) - low) / (high - low)

    settings = report.outcome.settings
    yield _text(
        LEFT, 20, f"{settings.suite}, {settings.frames} frames, seed {settings.seed}: questions about before, share right"
    )
    for tenth in range(0, 11, 2):
        yield _line([(LEFT, _y(tenth / 10)), (LEFT + WIDE, _y(tenth / 10))], FAINT)
        yield _text(LEFT - 30, _y(tenth / 10) + 4, f"{tenth / 10:.1f}")
    for percent in budgets:
        yield _text(x(percent) - 12, TOP + HIGH + 18, f"{percent:g} %")
    yield _text(LEFT, TOP + HIGH + 38, "budget, share of the stream's vision tokens")
    names, policies = [], list(dict.fromkeys(row.policy for row in rows))
    for number, policy in enumerate(policies):
        aside = 3 * (number - len(policies) / 2)  # so that bars stand side by side
        own = sorted((row for row in rows if row.policy == policy), key=_percent)
        if policy == FULL:
            points = [(float(LEFT), _y(own[0].share.value)), (float(LEFT + WIDE), _y(own[0].share.value))]
        else:
            points = [(x(_percent(row)) + aside, _y(row.share.value)) for row in own]
            for row, (place, _) in zip(own, points, strict=True):
                yield _line([(place, _y(row.share.low)), (place, _y(row.share.high))], _colour(number))
        yield _line(points, _colour(number), 2, dashed=policy in (FULL, ORACLE))
        names.append((points[-1][1], policy, number))
    last = -math.inf
    for y, policy, number in sorted(names):
        last = max(y, last + 14)
        yield _text(LEFT + WIDE + 10, last + 4, policy, _colour(number))


def _strips(report: Report, top: int) -> Iterator[str]:
    """The first stream: its objects, then what each policy still held at the end, the darker the more layers and heads."""
    outcome, shown = report.outcome, _shown(report)
    if not shown:
        return
    numbers, colours = _objects(report)
    title = f"the first stream at {shown[0].budget}, oldest frame left: its objects, and the patches held after the last frame"
    yield _text(12, top - 8, title)
    for place, colour in zip(_places(len(numbers), top), colours, strict=True):
        yield _patch(*place, colour or FAINT, 1.0)
    for line, cell in enumerate(shown, start=1):
        y = top + line * STRIP
        yield _text(12, y + 10, cell.label)
        wide = _places(len(numbers), y)[-1][0] - NAMES + PATCH
        yield f'<rect x="{NAMES}" y="{y}" width="{wide}" height="{GRID * PATCH}" fill="#f4f4f4"/>'
        kept = outcome.records[cell][0]["kept"]
        for place, colour, share in zip(_places(len(numbers), y), colours, kept, strict=True):
            if share:
                yield _patch(*place, colour or "#888", share / 100)


def _shown(report: Report) -> list[Cell]:
    """The cells of the budget nearest to an eighth, where policies differ and there is something to see."""
    cells = list(dict.fromkeys(row.cell for row in report.rows if row.policy != FULL))
    if not cells:
        return []
    budget = min((cell.budget for cell in cells), key=lambda text: abs(math.log(float(text.rstrip("%")) / 12.5)))
    return [cell for cell in cells if cell.budget == budget]


def _objects(report: Report) -> tuple[list[int], list[str | None]]:
    """Per token of the first stream the number of its object, -1 for none, and the colour to draw it in."""
    settings = report.outcome.settings
    world, numbers, colours = SUITES[settings.suite]([*seed_words(settings.seed), 0]), [], []
    for _ in range(settings.frames):
        world.step()
        present = {thing.number: COLORS[thing.color] for thing in world.history.present}
        for number in world.owners.tolist():
            numbers.append(number)
            colours.append({"white": "#000"}.get(present[number], present[number]) if number >= 0 else None)
    return numbers, colours


def _places(count: int, top: int) -> list[tuple[int, int]]:
    """Where each token of a stream is drawn: frames side by side, patches as they lie in the frame."""
    side = GRID * PATCH + GAP
    return [
        (NAMES + token // GRID**2 * side + token % GRID * PATCH, top + token % GRID**2 // GRID * PATCH)
        for token in range(count)
    ]


def _percent(row: Row) -> float:
    return float(row.budget.rstrip("%"))


def _y(share: float) -> float:
    return TOP + HIGH * (1 - share)


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _text(x: float, y: float, text: str, colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>'


def _line(points: list[tuple[float, float]], colour: str, width: int = 1, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _patch(x: int, y: int, colour: str, opacity: float) -> str:
    fade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return f'<rect x="{x}" y="{y}" width="{PATCH}" height="{PATCH}" fill="{colour}"{fade}/>'
