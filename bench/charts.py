"""Charts as SVG, drawn with matplotlib: lines over a growing stream, and bars."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgevlm.errors import UserError
from edgevlm.packages import install

PALETTE = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#aa3377", "#3399bb", "#888888", "#ee7733", "#994455", "#44aa99")
DASHES = ("-", "--", ":", "-.")  # so that lines are told apart in black and white
NOT_XML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]|[\U0001fffe-\U0001ffff]")


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its spread, if it has one, and a mark to hold it against."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    mark: float | None = None


def clean(text: object, longest: int = 200) -> str:
    """Text that may stand in XML: other characters become U+FFFD, and what is long is cut."""
    found = NOT_XML.sub("\ufffd", str(text))
    return found if len(found) <= longest else found[: longest - 1] + "…"


def lines(x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]], *, top: float | None = None) -> str:
    """SVG of named lines of points (x, y), from 0 up to ``top``; x is logarithmic where it spans more than a factor of 8.

    Empty without points.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    if not xs:
        return ""
    figure, axes = _figure(3.4)
    for number, (name, points) in enumerate(series.items()):
        style = {"color": PALETTE[number % len(PALETTE)], "linestyle": DASHES[number % len(DASHES)]}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=clean(name, 30), **style)
    if xs[0] > 0 and xs[-1] / xs[0] > 8:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(xs, [f"{x:,.0f}" for x in xs], rotation=45 if len(xs) > 8 else 0)
    axes.set_ylim(0, top)
    axes.set(xlabel=clean(x_label), ylabel=clean(y_label))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _svg(figure)


def bars(x_label: str, rows: Sequence[Bar]) -> str:
    """SVG of horizontal bars with their values and spreads; marks are red. Empty without rows."""
    if not rows:
        return ""
    figure, axes = _figure(0.8 + 0.24 * len(rows))
    places = range(len(rows))
    spreads = [(row.value - (row.low or row.value), (row.high or row.value) - row.value) for row in rows]
    errors = [[max(0.0, low) for low, _ in spreads], [max(0.0, high) for _, high in spreads]]
    drawn = axes.barh(places, [row.value for row in rows], xerr=errors, color=PALETTE[0], error_kw={"elinewidth": 1})
    axes.bar_label(drawn, [f" {row.value:.3g}" + (f" / {row.mark:.3g}" if row.mark else "") for row in rows], fontsize=8)
    for place, row in zip(places, rows, strict=True):
        if row.mark is not None:
            axes.plot([row.mark, row.mark], [place - 0.4, place + 0.4], color=PALETTE[1], linewidth=3)
    axes.set_yticks(places, [clean(row.label, 48) for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel=clean(x_label))
    axes.margins(x=0.15)
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"charts need matplotlib: {install('report')}") from None
    figure = Figure(figsize=(8, height), layout="constrained")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "edgevlm", "text.parse_math": False, "font.size": 9})
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its fonts lack: the viewer's fonts draw them
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
