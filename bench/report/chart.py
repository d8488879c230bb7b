"""Two kinds of chart as SVG for a page: lines over a growing stream, and bars. Text takes the page's colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgevlm.bench.report.text import plain, safe, short

PALETTE = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#aa3377", "#3399bb", "#888888", "#ee7733", "#994455", "#44aa99")
DASHES = ("", "7 3", "2 3", "9 3 2 3")  # so that lines are told apart in black and white
WIDTH, LEFT, RIGHT, TOP, HIGH, BOTTOM = 760, 64, 190, 34, 230, 46  # pixels
BAR, LABELS, VALUES = 20, 250, 150  # of bars: height, room for labels, and for values at their right
NAME = 30  # characters of a label


@dataclass(frozen=True, slots=True)
class Series:
    """A name and points (x, y), x rising."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its spread, if it has one, and a mark to hold it against."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from ``low`` to ``high`` on ``length`` pixels from ``start``."""

    low: float
    high: float
    start: float
    length: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + self.length * (value - low) / (high - low)


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series], *, top: float | None = None) -> str:
    """Lines from 0 up; x is logarithmic where it spans more than a factor of 8. top: of the y axis. Empty without points."""
    xs = sorted({x for one in series for x, _ in one.points})
    ys = [y for one in series for _, y in one.points]
    if not xs or min(ys) < 0:
        return ""
    ticks = steps(top if top is not None else max(ys))
    log = xs[0] > 0 and xs[-1] / xs[0] > 8
    low, high = (xs[0], xs[-1]) if xs[0] < xs[-1] else (xs[0] - 1, xs[0] + 1)
    across = Axis(low, high, LEFT, WIDTH - LEFT - RIGHT, log)
    up = Axis(0, ticks[-1], TOP + HIGH, -HIGH)
    drawn = [*_grid(ticks, up), *_below(xs, across), *_all(series, across, up)]
    height = TOP + HIGH + BOTTOM
    drawn.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 8, x_label, "middle"))
    drawn.append(_text(4, 18, y_label))
    return _svg(title, WIDTH, height, drawn)


def bars(title: str, unit: str, rows: Sequence[Bar], mark: str = "") -> str:
    """Bars from 0, a line for a spread; ``mark``: what the upright lines across them stand for. Empty without rows."""
    if not rows:
        return ""
    most = max(max(row.value, row.high or 0, row.mark or 0) for row in rows)
    along = Axis(0, most or 1, LABELS, WIDTH - LABELS - VALUES)
    told = len({row.mark for row in rows}) > 1  # a mark that is the same for all needs no number
    drawn = list[str]()
    for number, row in enumerate(rows):
        y = TOP + number * BAR
        drawn += [
            _text(LABELS - 8, y + 14, short(row.label, 40), "end"),
            _box(LABELS, y + 3, along(row.value) - LABELS, BAR - 6),
        ]
        if row.low is not None and row.high is not None:
            drawn.append(_line([(along(row.low), y + BAR / 2), (along(row.high), y + BAR / 2)], 'class="ink"'))
        if row.mark is not None:
            drawn.append(_line([(along(row.mark), y), (along(row.mark), y + BAR)], f'stroke="{PALETTE[1]}" stroke-width="3"'))
        right = max(along(row.value), along(row.high or 0), along(row.mark or 0))
        beside = f" / {plain(row.mark)}" if told and row.mark is not None else ""
        drawn.append(_text(right + 6, y + 14, plain(row.value) + beside))
    said = f"{unit}; {mark}" if mark else unit
    return _svg(title, WIDTH, TOP + len(rows) * BAR + 12, [_text(4, 18, said), *drawn])


def steps(most: float) -> list[float]:
    """Round numbers from 0 to ``most`` or a little more, four to eight of them."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return [step * count for count in range(math.ceil(most / step - 1e-9) + 1)]


def _grid(ticks: Sequence[float], up: Axis) -> Iterator[str]:
    for tick in ticks:
        yield _line([(LEFT, up(tick)), (WIDTH - RIGHT, up(tick))], 'class="faint"')
        yield _text(LEFT - 6, up(tick) + 4, plain(tick), "end")


def _below(xs: Sequence[float], across: Axis) -> Iterator[str]:
    """Labels of measured places, those left out that would run into another."""
    last = -math.inf
    for x in xs:
        if across(x) - last >= 44:
            last = across(x)
            yield _text(last, TOP + HIGH + 18, plain(x), "middle")


def _all(series: Sequence[Series], across: Axis, up: Axis) -> Iterator[str]:
    names = list[tuple[float, int, str]]()
    for number, one in enumerate(series):
        if not one.points:
            continue
        places = [(across(x), up(y)) for x, y in one.points]
        yield _line(places, _stroke(number))
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(number)}"/>' for x, y in places)
        names.append((places[-1][1], number, one.name))
    room = TOP + HIGH - 14 * (len(names) - 1)  # so that the last name stands no lower than the axis
    last = -math.inf
    for count, (y, number, name) in enumerate(sorted(names)):
        last = max(last + 14, min(y, room + 14 * count))
        yield _line([(WIDTH - RIGHT + 8, last), (WIDTH - RIGHT + 28, last)], _stroke(number))
        yield _text(WIDTH - RIGHT + 32, last + 4, short(name, NAME))


def _stroke(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f'stroke="{_colour(number)}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _svg(title: str, width: float, height: float, drawn: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{safe(title)}">'
    return f"<figure><figcaption>{safe(title)}</figcaption>{head}{''.join(drawn)}</svg></figure>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" {style}/>'


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="{PALETTE[0]}"/>'
